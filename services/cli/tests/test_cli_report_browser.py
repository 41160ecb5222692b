"""The report in a real browser: it fits two widths, light and dark are what they say, the arrow
keys show numbers.
"""

import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest
from test_cli_report import make_run

from pipelinerl_cli.__main__ import main

BROWSER = shutil.which("chromium")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium: apt-get install chromium")

QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
PROBE = """<script>
const say = (fault) => { document.body.prepend(Object.assign(document.createElement("p"), {
  style: "position:fixed;top:0;left:0;margin:0;width:9px;height:9px;background:#f00",
  title: fault })); };
addEventListener("error", (event) => say(event.message));
const svg = document.querySelector("svg"), tip = svg.closest("figure").querySelector(".tip");
svg.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft" }));
if (tip.hidden || !tip.textContent.includes("reward")) say("the arrow keys show nothing");
if (document.documentElement.scrollWidth > innerWidth) say("wider than the window");
</script>"""
"""Turns the top left corner red when something is wrong."""


def first_pixel(png: bytes) -> tuple[int, int, int]:
    """The first pixel of an 8-bit RGB or RGBA picture, which every filter of a line stores as it
    is.
    """
    position, data = 8, b""
    while position < len(png):
        (length,), kind = (
            struct.unpack(">I", png[position : position + 4]),
            png[position + 4 : position + 8],
        )
        data += png[position + 8 : position + 8 + length] if kind == b"IDAT" else b""
        position += length + 12
    red, green, blue = zlib.decompress(data)[1:4]
    return red, green, blue


@pytest.mark.parametrize(
    ("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]
)
def test_report_fits_the_window_in_light_and_dark(tmp_path: Path, width: int, scheme: str) -> None:
    run = make_run(
        tmp_path / "run", [k / 30 for k in range(30)], seconds_per_step=5000.0
    )  # long times are wide numbers
    main(["report", str(run)])
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text((run / "report.html").read_text().replace("</body>", f"{PROBE}</body>"))
    subprocess.run(
        [
            str(BROWSER),
            *QUIET,
            *(["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []),
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--window-size={width},900",
            f"--screenshot={picture}",
            page.as_uri(),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    background = first_pixel(picture.read_bytes())
    assert background == ((0xF7, 0xF7, 0xF5) if scheme == "light" else (0x12, 0x14, 0x18))
