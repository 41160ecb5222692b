"""`charts/crd/generate [--check]`: writes the chart's CRD, or fails if it is out of
date.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from crd.definition import render_template

CHECKOUT = Path(__file__).parents[2]
TEMPLATE = Path("charts/pipelinerl/templates/crd.yaml")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="charts/crd/generate", description="Writes the chart's CRD."
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail when the file differs"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=CHECKOUT / TEMPLATE,
        help=f"default: {TEMPLATE} of this checkout",
    )
    flags = parser.parse_args(argv)
    text = render_template()
    if not flags.check:
        flags.output.parent.mkdir(parents=True, exist_ok=True)
        flags.output.write_text(text, encoding="utf-8")
        return 0
    there = flags.output.read_text(encoding="utf-8") if flags.output.exists() else ""
    if there != text:
        sys.stderr.write(f"{flags.output} is out of date: run charts/crd/generate\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
