"""`events.jsonl`: every event that the staleness policy heard and everything that it decided, one
line each.

[1764450000.123, "take", [4], [["0-16", "0-17"], [], ""]]    seconds since the epoch, then a record
of `recording`

`pipelinerl replay` feeds them through a fresh policy. Every start of the preprocessor begins a new policy in the same file.
A file that has grown to `MAX_BYTES` ends there; the next start moves it to `events.1.jsonl`, in
place of an older one.
"""

import json
import logging
import os
import time
from pathlib import Path
from typing import Any, TextIO

from pipelinerl_common.lines import cut_torn_line

log = logging.getLogger(__name__)

MAX_BYTES = 256 << 20


class EventLog:
    """Appends lines. A disk that refuses ends the log, not the run."""

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
        """One record, unless the log has ended."""
        if self._file is None:
            return
        line = (
            json.dumps([round(time.time(), 3), method, arguments, answer], separators=(",", ":"))
            + "\n"
        )
        try:
            self._file.write(line)
        except OSError as error:
            self._end(f"it cannot be written: {error}")
            return
        self._num_bytes += len(line)
        if self._num_bytes >= self._max_bytes:
            self._end(f"it has grown to its limit of {self._max_bytes} bytes")

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
