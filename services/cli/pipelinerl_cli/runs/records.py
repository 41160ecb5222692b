"""metrics.jsonl: one metrics record per line, in the order of arrival.

Counters of processes that may begin again at 0.
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
"""Of an instance, records that are not tied to a step are kept at most once per this many seconds
and second of the run's age: one a second in the first hour, one in 24 seconds after a day. So they
grow with the logarithm of time.
"""

SESSION_ROLE = "up"
"""Role of the records that `pipelinerl up` writes about itself; never thinned."""


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
        return json.dumps(
            {
                "role": self.role,
                "instance": self.instance,
                "time": self.time,
                "step": self.step,
                "values": values,
            },
            allow_nan=False,
        )


def ends_step(record: Record) -> bool:
    """Whether it is what the trainer tells after an optimizer step."""
    return record.role == "trainer" and record.step >= 0 and "reward_mean" in record.values


def parse_record(line: str) -> Record:
    """Raises ValueError for anything but a record. A null value reads as not-a-number."""
    document: Any = json.loads(line)
    if not isinstance(document, dict) or not isinstance(document.get("values"), dict):
        raise ValueError("not a metrics record")
    values = {
        str(name): math.nan if value is None else float(value)
        for name, value in document["values"].items()
    }
    return Record(
        role=str(document["role"]),
        instance=str(document["instance"]),
        time=float(document["time"]),
        step=int(document["step"]),
        values=values,
    )


def read_records(path: Path) -> Iterator[Record]:
    """Records in the file's order. A last line that a crash cut short is left out. Raises
    SettingsError.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    yield parse_record(line)
                except (ValueError, KeyError, TypeError) as error:
                    if line.endswith("\n"):
                        raise SettingsError(
                            f"{path}: line {number} is not a metrics record: {error}"
                        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from error


@dataclass
class MetricsWriter:
    """Appends records, each once, over all sessions of a run: after a resume the stream replays
    from its beginning.
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
        """Goes on with an existing file, whose records `take` is given. Raises SettingsError when
        it is not ours.
        """
        writer = cls(path, started_at=now)
        if path.exists():
            cut_torn_line(path)
            for record in read_records(path):
                writer.started_at = min(writer.started_at, record.time)
                writer._newest[record.instance] = max(
                    record.time, writer._newest.get(record.instance, 0.0)
                )
                take(record)
        writer._file = path.open("ab", buffering=0)
        return writer

    def write(self, record: Record) -> bool:
        """Whether the record was news. What is news may still be thinned out of the file. After an
        OSError it stays news.
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
    """Whole or not at all: of a line that does not fit, what a full disk took is cut off again.
    Raises OSError.
    """
    end = file.seek(0, os.SEEK_END)
    try:
        if file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        with suppress(OSError):  # a device has no end to be cut
            file.truncate(end)
        raise


REPORTING_EVERY_SECOND = ("actor", "preprocessor")
"""Roles whose processes write a record about once a second, whatever they do."""


QUIET_S = 20.0
"""So long they are not silent by chance."""


def quiet_in_file_s(run_seconds: float) -> float:
    """`QUIET_S` where records come from the run's file, which keeps fewer of them as the run grows
    old.
    """
    return QUIET_S + 3 * THINNING_S_PER_S * run_seconds


def has_left(record: Record) -> bool:
    """Whether it is the last one of an actor that was let go."""
    return record.values.get("requests_limit") == 0.0


def increase(before: float, now: float) -> float:
    """Of a counter; less than before means that its process began again at 0. Example: increase(5,
    1) is 1.
    """
    return now - before if now >= before else now


def counter_total(values: Iterable[float]) -> float:
    """The sum of a counter's increases. Example: [3, 5, 1, 4] is 5 + 4 = 9."""
    return sum(increase(before, now) for before, now in pairwise(chain([0.0], values)))


SILENCE_RECORD = "silent_{name}_seconds"
"""Name of the value in the records of `pipelinerl up`; 0 once the generator answers again or was
ended.
"""


_RECORDED = re.compile(SILENCE_RECORD.format(name="(.+)"))


def silent_name(value_name: str) -> str | None:
    """Whose silence a value is, None of another value. Example: "silent_generator-0-0_seconds" is
    generator-0-0's.
    """
    found = _RECORDED.fullmatch(value_name)
    return found[1] if found else None


SESSION_START = "session_started"
"""Name of the value that marks the first record of a session."""


SILENCE_LIMIT_S = 180.0
"""Then the process is ended, and started again like one that has crashed; the kubelet waits as
long.
"""
