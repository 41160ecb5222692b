"""`pipelinerl replay DIR`: a recorded run's events through a fresh policy, its decisions compared
with the recorded ones.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from pipelinerl_common.text import counted, did_you_mean_folder
from pipelinerl_staleness.recording import Record, replay

FILES = ("events.1.jsonl", "events.jsonl")
"""In the order in which they were written; the first is there only when the log has outgrown one
file.
"""

EXIT_DIFFERENT, EXIT_BAD_INPUT = 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="a run's output folder, the one with events.jsonl"
    )


def run(args: argparse.Namespace) -> int:
    """0: every decision is the same; 1: one is not, its line is printed; 2: nothing can be read."""
    paths = [args.folder / name for name in FILES if (args.folder / name).is_file()]
    if not paths:
        hint = did_you_mean_folder(args.folder)
        print(
            f"replay: {args.folder} has no {FILES[-1]}: give the output folder of a run{hint}",
            file=sys.stderr,
        )  # noqa: T201
        return EXIT_BAD_INPUT
    where = ""

    def records() -> Iterator[Record]:
        nonlocal where
        for path in paths:
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    where = f"{path}:{number}"
                    if line.endswith(
                        b"\n"
                    ):  # a running or crashed preprocessor may be in the middle of its last line
                        yield _record_of(line)

    try:
        outcome = replay(records())
    except (ValueError, OSError, RecursionError) as error:
        print(f"replay: {where}: not an event: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_DIFFERENT
    agreed = (
        f"{counted(outcome.num_events, 'event')} fed to a fresh policy, "
        f"{counted(outcome.num_decisions, 'decision')} compared"
    )
    if outcome.difference is None:
        print(f"{agreed}: {'all agree' if outcome.num_decisions else 'none was recorded yet'}")  # noqa: T201
        return 0
    print(f"{agreed}, which agree; the next one differs")  # noqa: T201
    print(f"{where}: {outcome.difference.what}")  # noqa: T201
    return EXIT_DIFFERENT


def _record_of(line: bytes) -> Record:
    fields = json.loads(line)
    if (
        not isinstance(fields, list)
        or len(fields) != 4
        or not isinstance(fields[1], str)
        or not isinstance(fields[2], list)
    ):
        raise ValueError(
            "expected [seconds, method, arguments, answer], got "
            f"{line[:80].decode(errors='replace')!r}"
        )
    return fields[1], fields[2], fields[3]
