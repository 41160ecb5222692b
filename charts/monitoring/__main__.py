"""Writes the chart's dashboards and alerts, or lists those that are out of date."""

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="charts/monitoring/generate", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; status 1 when a file is out of date"
    )
    args = parser.parse_args(argv)
    from monitoring.files import stale, write

    if not args.check:
        write()
        return 0
    for path in stale():
        print(
            f"charts/pipelinerl/{path}: out of date; run charts/monitoring/generate",
            file=sys.stderr,
        )
    return 1 if stale() else 0


if __name__ == "__main__":
    sys.exit(main())
