"""A real Prometheus on loopback for one test."""

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

PROMETHEUS = shutil.which("prometheus")
MISSING = "no prometheus: apt-get install prometheus"
START_S = 60.0


class Prometheus:
    """HTTP client of a running Prometheus."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **parameters: str | float) -> Any:
        """The field `data` of the response. Raises AssertionError with the server's message about a
        wrong query.
        """
        try:
            with urllib.request.urlopen(
                f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=60
            ) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def series(
        self, query: str, start: float, end: float, step_s: float = 1.0
    ) -> list[dict[str, Any]]:
        """Series between two times, each with its labels (`metric`) and [time, value] pairs
        (`values`).
        """
        result: list[dict[str, Any]] = self.get(
            "query_range", query=query, start=start, end=end, step=step_s
        )["result"]
        return result

    def alerts(self) -> list[dict[str, Any]]:
        """Alerts that are pending or firing now."""
        found: list[dict[str, Any]] = self.get("alerts")["alerts"]
        return found

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@contextmanager
def running(
    folder: Path, scrape: Sequence[Mapping[str, Any]], rules: Mapping[str, Any]
) -> Iterator[Prometheus]:
    """Scrapes and evaluates `rules` every second until the block is left. All its files are in
    `folder`.
    """
    assert PROMETHEUS is not None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rules.yaml").write_text(yaml.safe_dump(dict(rules)))
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [dict(each) for each in scrape],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = [
        "--config.file=prometheus.yaml",
        "--storage.tsdb.path=data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([PROMETHEUS, *flags], cwd=folder, stdout=log, stderr=log)
    try:
        server = Prometheus(f"http://127.0.0.1:{port}")
        deadline = time.monotonic() + START_S
        while not server.is_ready():
            said = (folder / "log").read_text(errors="replace")[-2000:]
            assert process.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait(30)
