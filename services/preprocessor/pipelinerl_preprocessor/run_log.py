"""The two logs that a run keeps of its groups.

trained.jsonl   one line per committed step, by which anyone can check that no group was trained
                twice: {"step": 7, "incarnation": 0, "groups": [{"group_id": "0-56",
                "prompt_index": 56}, ...]}
events.jsonl    one line per event that the staleness policy received and per decision that it took:
                [1764450000.123, "take", [4], [["0-16", "0-17"], [], ""]], which is seconds since
                the epoch, then a record of `pipelinerl_staleness.recording`

`pipelinerl replay` feeds the events to a new policy. Every start of the preprocessor begins a new
policy in the same file. A file that has grown to `MAX_BYTES` ends there; the next start moves it to
`events.1.jsonl`, in place of an older one.
"""

import json
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from pipelinerl_common.files import cut_torn_line
from pipelinerl_preprocessor.groups import Group

log = logging.getLogger(__name__)

MAX_BYTES = 256 << 20
"""Size at which events.jsonl ends."""


class TrainedLog:
    """The writer of trained.jsonl. It only appends, except that a rewind to step k drops the lines
    of step k and later.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, step: int, incarnation: int, groups: Iterable[Group]) -> None:
        named = [{"group_id": each.group_id, "prompt_index": each.prompt_index} for each in groups]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A full disk may have cut off the previous line: this one must not be joined to it.
        cut_torn_line(self.path)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line({"step": step, "incarnation": incarnation, "groups": named}))

    def rewind(self, num_committed: int) -> None:
        """Keeps the lines of steps before `num_committed`; a line that a crash left unfinished is
        dropped too.
        """
        if not self.path.exists():
            return
        kept = self.path.with_suffix(".rewinding")
        with self.path.open(encoding="utf-8") as old, kept.open("w", encoding="utf-8") as new:
            new.writelines(line for line in old if _step_of(line) < num_committed)
        os.replace(kept, self.path)


def _step_of(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"


class EventLog:
    """The writer of events.jsonl. A disk that refuses a write ends the log, not the run."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._file: TextIO | None = None
        try:
            self._open()
        except OSError as error:
            self._end(f"it cannot be opened: {error}")

    def write(self, method: str, arguments: list[Any], answer: Any) -> None:
        """Appends one record, unless the log has ended."""
        if self._file is None:
            return
        line = _line([round(time.time(), 3), method, arguments, answer])
        try:
            self._file.write(line)
        except OSError as error:
            self._end(f"it cannot be written: {error}")
            return
        self._num_bytes += len(line)
        if self._num_bytes >= self._max_bytes:
            self._end(f"it has grown to its limit of {self._max_bytes} bytes")

    def note(self, what: str, values: list[Any]) -> None:
        """Appends a record that no policy receives."""
        self.write(what, values, None)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size >= self._max_bytes:
            os.replace(self.path, self.path.with_suffix(".1.jsonl"))
        cut_torn_line(self.path)
        self._file = self.path.open("a", encoding="utf-8", buffering=1)
        self._num_bytes = self.path.stat().st_size

    def _end(self, why: str) -> None:
        log.warning("no more events are logged to %s: %s", self.path, why)
        try:
            self.close()
        except OSError as error:
            log.debug("closing %s: %s", self.path, error)
