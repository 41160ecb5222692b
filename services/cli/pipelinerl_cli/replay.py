"""`pipelinerl replay DIR`: feeds a recorded run's events to a fresh policy and compares its
decisions with the recorded ones.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.text import counted, did_you_mean_folder
from pipelinerl_staleness.recording import Record, replay

FILES = ("events.1.jsonl", "events.jsonl")
"""In the order in which they were written; the first one exists only when the log has outgrown one
file.
"""
EXIT_DIFFERENT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="a run's output folder, the one with events.jsonl"
    )


def run(args: argparse.Namespace) -> int:
    """0: every decision is the same; 1: one is not, its line is printed. Raises SettingsError where
    no event, or not every event, can be read.
    """
    paths = [args.folder / name for name in FILES if (args.folder / name).is_file()]
    if not paths:
        hint = did_you_mean_folder(args.folder)
        raise SettingsError(
            f"{args.folder} has no {FILES[-1]}: give the --output folder of a run{hint}"
        )
    events = _Events(paths)
    try:
        outcome = replay(events.records())
    except (ValueError, OSError, RecursionError) as error:
        raise SettingsError(f"{events.place}: not an event: {error}") from error
    agreed = (
        f"{counted(outcome.num_events, 'event')} fed to a fresh policy, "
        f"{counted(outcome.num_decisions, 'decision')} compared"
    )
    if outcome.difference is None:
        print(f"{agreed}: {'all agree' if outcome.num_decisions else 'none was recorded yet'}")
        return 0
    print(f"{agreed}, which agree; the next one differs")
    print(f"{events.place}: {outcome.difference.what}")
    return EXIT_DIFFERENT


class _Events:
    """The recorded events, and the place of the newest one that was read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self.place = ""

    def records(self) -> Iterator[Record]:
        for path in self._paths:
            with path.open("rb") as file:
                yield from self._records_in(path, file)

    def _records_in(self, path: Path, lines: Iterable[bytes]) -> Iterator[Record]:
        for number, line in enumerate(lines, start=1):
            self.place = f"{path}:{number}"
            # A running or crashed preprocessor may have written part of its last line.
            if line.endswith(b"\n"):
                yield _record_of(line)


def _record_of(line: bytes) -> Record:
    event = json.loads(line)
    if isinstance(event, list) and len(event) == 4:
        _, method, arguments, answer = event
        if isinstance(method, str) and isinstance(arguments, list):
            return method, arguments, answer
    raise ValueError(
        f"expected [seconds, method, arguments, answer], got {line[:80].decode(errors='replace')!r}"
    )
