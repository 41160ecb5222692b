"""The records of a run: metrics.jsonl holds one metrics record per line, in the order of arrival.
`pipelinerl up` adds some about itself.
"""

import errno
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.files import cut_torn_line

THINNING_S_PER_S = 1.0 / 3600.0
"""Records of one instance that are not tied to a step are kept at most once per this many seconds
for each second of the run's age: one a second in the first hour, one in 24 seconds after a day. So
the file grows with the logarithm of time.
"""
REPORTING_EVERY_SECOND = ("actor", "preprocessor")
"""Roles whose processes write a record about once a second, whatever they do."""
QUIET_S = 20.0
"""A gap this long between such records is no coincidence."""

SESSION_ROLE = "up"
"""Role of the records that `pipelinerl up` writes about itself; never thinned."""
SESSION_START = "session_started"
"""The value that marks the first record of a session."""
SILENCE_RECORD = "silent_{name}_seconds"
"""Name of the seconds for which a running generator has not answered; 0 once it answers again or
was ended.
"""
SILENCE_LIMIT_S = 180.0
"""After this long the generator is ended and restarted like a crashed one; the kubelet waits as
long.
"""
_SILENCE = re.compile(SILENCE_RECORD.format(name="(.+)"))


@dataclass(frozen=True, slots=True)
class Record:
    """One MetricsRecord. Example: Record("trainer", "trainer-0", 1764446400.5, 12, {"reward_mean":
    0.41}).
    """

    role: str
    instance: str
    time: float
    """Seconds since the epoch."""
    step: int
    """Optimizer steps finished; -1 when not tied to a step."""
    values: Mapping[str, float]

    def to_json(self) -> str:
        values = {
            name: value if math.isfinite(value) else None for name, value in self.values.items()
        }
        head = {"role": self.role, "instance": self.instance, "time": self.time, "step": self.step}
        return json.dumps({**head, "values": values}, allow_nan=False)


def parse_record(line: str) -> Record:
    """Raises ValueError for anything but a record. A null value reads as not-a-number."""
    document: Any = json.loads(line)
    if not isinstance(document, dict) or not isinstance(document.get("values"), dict):
        raise ValueError("not a metrics record")
    return Record(
        role=str(document["role"]),
        instance=str(document["instance"]),
        time=float(document["time"]),
        step=int(document["step"]),
        values={
            str(name): math.nan if value is None else float(value)
            for name, value in document["values"].items()
        },
    )


def read_records(path: Path) -> Iterator[Record]:
    """Records in the file's order. A last line that a crash cut short is left out. Raises
    SettingsError.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if (record := _record_of(path, number, line)) is not None:
                    yield record
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from error


def _record_of(path: Path, number: int, line: str) -> Record | None:
    try:
        return parse_record(line)
    except (ValueError, KeyError, TypeError) as error:
        if not line.endswith("\n"):
            return None
        raise SettingsError(f"{path}: line {number} is not a metrics record: {error}") from error


def ends_step(record: Record) -> bool:
    """Whether the trainer wrote it after an optimizer step."""
    return record.role == "trainer" and record.step >= 0 and "reward_mean" in record.values


def has_left(record: Record) -> bool:
    """Whether it is the last record of an actor that autoscaling has removed."""
    return record.values.get("requests_limit") == 0.0


def silences(record: Record) -> dict[str, float]:
    """Seconds of silence by generator, 0 once it has ended. Example: the value
    "silent_generator-0-0_seconds" belongs to generator-0-0.
    """
    found = ((_SILENCE.fullmatch(name), value) for name, value in record.values.items())
    return {match[1]: value for match, value in found if match}


def quiet_in_file_s(run_seconds: float) -> float:
    """`QUIET_S` for records of the run's file, which keeps fewer of them the older the run is."""
    return QUIET_S + 3 * THINNING_S_PER_S * run_seconds


def increase(before: float, now: float) -> float:
    """A counter's increase. A smaller value means that its process restarted at 0. Example:
    increase(5, 1) is 1.
    """
    return now - before if now >= before else now


def counter_total(values: Iterable[float]) -> float:
    """The sum of a counter's increases. Example: [3, 5, 1, 4] is 5 + 4 = 9."""
    return sum(increase(before, now) for before, now in pairwise(chain([0.0], values)))


@dataclass
class MetricsWriter:
    """Appends records to metrics.jsonl, each once over all sessions of a run: after a resume the
    stream replays from its beginning.
    """

    path: Path
    started_at: float
    """When the run began, seconds since the epoch."""
    _newest: dict[str, float] = field(default_factory=dict)
    _newest_kept: dict[str, float] = field(default_factory=dict)
    _file: FileIO | None = None

    @classmethod
    def open(
        cls, path: Path, now: float, take: Callable[[Record], object] = lambda record: None
    ) -> "MetricsWriter":
        """Continues an existing file, whose records are passed to `take`. Raises SettingsError when
        the file is something else.
        """
        writer = cls(path, started_at=now)
        if path.exists():
            cut_torn_line(path)
            for record in read_records(path):
                writer.started_at = min(writer.started_at, record.time)
                newest = writer._newest.get(record.instance, 0.0)
                writer._newest[record.instance] = max(record.time, newest)
                take(record)
        writer._file = path.open("ab", buffering=0)
        return writer

    def write(self, record: Record) -> bool:
        """Whether the record is new. A new one may still be thinned out of the file. After an
        OSError it counts as new again.
        """
        if record.time <= self._newest.get(record.instance, 0.0):
            return False
        if self._file is not None and self._is_due(record):
            _append(self._file, f"{record.to_json()}\n".encode())
            self._newest_kept[record.instance] = record.time
        self._newest[record.instance] = record.time
        return True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _is_due(self, record: Record) -> bool:
        if record.step >= 0 or record.role == SESSION_ROLE:
            return True
        interval = (record.time - self.started_at) * THINNING_S_PER_S
        return record.time - self._newest_kept.get(record.instance, 0.0) >= interval


def _append(file: FileIO, line: bytes) -> None:
    """Writes the whole line or nothing. Raises OSError."""
    end = file.seek(0, os.SEEK_END)
    try:
        if file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        # A full disk takes part of a line, which would tear the next one: cut it off again. A
        # device has no end to cut.
        with suppress(OSError):
            file.truncate(end)
        raise
