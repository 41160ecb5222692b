"""Numbers that add up over a run's sessions, record by record: its time, the time in which it
trained, tokens, means, rollbacks. One definition for the live display and for the summary.
"""

import bisect
import math
from array import array

from pipelinerl_common.metrics import PREPROCESSOR
from pipelinerl_common.runs.records import SESSION_START, Record, ends_step, increase
from pipelinerl_common.text import counted

TOKENS = "tokens_generated_total"
DROPPED = "groups_dropped_total{reason=rollback}"


class ActiveTime:
    """Maps clock time to seconds of the run: a run that was stopped for an hour and resumed is not
    an hour longer. Takes all records in their order.
    """

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._offsets: list[float] = []
        """Seconds of the run at each session's start."""

    def take(self, record: Record) -> None:
        if SESSION_START in record.values or not self._starts:
            self._offsets.append(self.total)
            self._starts.append(record.time)
            self._ends.append(record.time)
        self._ends[-1] = max(self._ends[-1], record.time)

    def at(self, time: float) -> float:
        """Seconds of the run at clock time `time`."""
        session = bisect.bisect_right(self._starts, time) - 1
        if session < 0:
            return 0.0
        elapsed = time - self._starts[session]
        if session < len(self._starts) - 1:  # the newest session has no known end
            elapsed = min(elapsed, self._length(session))
        return self._offsets[session] + elapsed

    @property
    def total(self) -> float:
        return self._offsets[-1] + self._length(-1) if self._starts else 0.0

    @property
    def session_start(self) -> float | None:
        """Clock time at which the newest session began."""
        return self._starts[-1] if self._starts else None

    def _length(self, session: int) -> float:
        return max(0.0, self._ends[session] - self._starts[session])


class TrainingTime:
    """Maps clock time to seconds of training: each session counts from its first token or step to
    its last.

    Example: sessions that generated or trained from 10 to 16 and from 100 to 120 make 26 s, and 110
    is at 16 s.
    """

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._is_open = False
        """The newest session has generated or trained."""

    def begin_session(self) -> None:
        self._is_open = False

    def take(self, start: float, end: float) -> None:
        """Something was generated or trained from clock time `start` to `end`."""
        if not self._is_open:
            self._is_open = True
            self._starts.append(start)
            self._ends.append(end)
        floor = self._ends[-2] if len(self._ends) > 1 else -math.inf
        self._starts[-1] = max(floor, min(self._starts[-1], start))
        self._ends[-1] = max(self._ends[-1], end)

    @property
    def total(self) -> float:
        return sum(end - start for start, end in zip(self._starts, self._ends, strict=True))

    def at(self, time: float) -> float:
        """Seconds of training up to clock time `time`."""
        sessions = zip(self._starts, self._ends, strict=True)
        return sum(max(0.0, min(time, end) - start) for start, end in sessions)

    def contains(self, time: float) -> bool:
        """Whether the run generated or trained at clock time `time`."""
        session = bisect.bisect_right(self._starts, time) - 1
        return session >= 0 and time <= self._ends[session]


class Generation:
    """The number of tokens that the actors have generated, and their speed. Takes all records in
    their order.
    """

    def __init__(self) -> None:
        self.tokens = 0.0
        """By all actors, over restarts of their processes and all sessions."""
        self.time = ActiveTime()
        self.training_time = TrainingTime()
        self._counted: dict[str, float] = {}
        self._newest: float | None = None
        """When an actor last counted its tokens, in the newest session."""

    def take(self, record: Record) -> None:
        self.time.take(record)
        if SESSION_START in record.values:
            self.training_time.begin_session()
            self._newest = None
        if ends_step(record):
            self.training_time.take(_start_of_step(record), record.time)
        total = record.values.get(TOKENS, math.nan) if record.role == "actor" else math.nan
        if math.isfinite(total):
            self._count(record, total)

    def _count(self, record: Record, total: float) -> None:
        more = increase(self._counted.get(record.instance, 0.0), total)
        if more:
            # They were generated after the last record of an actor, which did not have them yet.
            start = record.time if self._newest is None else self._newest
            self.tokens += more
            self.training_time.take(start, record.time)
        self._counted[record.instance] = total
        self._newest = record.time

    @property
    def tokens_per_second(self) -> float:
        """Mean over the training time. Not-a-number without tokens."""
        seconds = self.training_time.total
        return self.tokens / seconds if self.tokens > 0 and seconds > 0 else math.nan


def _start_of_step(record: Record) -> float:
    """When the trainer had the step's samples; before, it may have waited for the generators to
    start.
    """
    worked = record.values.get("step_seconds", 0.0) - record.values.get("wait_seconds", 0.0)
    return record.time - worked if worked > 0 else record.time


class StepMean:
    """The mean of a trainer's value over the steps that count. Steps done before the trainer went
    back to a checkpoint, and done again since, do not count twice.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._steps = array("q")
        self._values = array("d")
        self._sum = 0.0

    def take(self, record: Record) -> None:
        if not ends_step(record):
            return
        while self._steps and self._steps[-1] >= record.step:
            self._steps.pop()
            self._sum -= self._values.pop()
        value = record.values.get(self._name, math.nan)
        if math.isfinite(value):
            self._steps.append(record.step)
            self._values.append(value)
            self._sum += value

    @property
    def mean(self) -> float:
        """Not-a-number without a value."""
        return self._sum / len(self._steps) if self._steps else math.nan


class Rollback:
    """Notices that the trainer went back to a checkpoint, which the preprocessor reports at once.
    Takes all records in their order.
    """

    def __init__(self) -> None:
        self.line = ""
        """A sentence about it when the newest record shows it, else empty."""
        self._step = 0
        """Steps committed."""
        self._dropped = 0.0

    def take(self, record: Record) -> None:
        self.line = ""
        if record.role != PREPROCESSOR or record.step < 0:
            return
        dropped = record.values.get(DROPPED, 0.0)
        if record.step < self._step:
            self.line = _rollback(record.step, self._step, int(increase(self._dropped, dropped)))
        self._step, self._dropped = record.step, dropped


def _rollback(step: int, was: int, num_dropped: int) -> str:
    """Example: "the trainer resumed after step 10: steps 11 to 16 are repeated, 96 groups were
    dropped".
    """
    repeated = f"step {was} is" if was == step + 1 else f"steps {step + 1} to {was} are"
    groups = ""
    if num_dropped:
        groups = (
            f", {counted(num_dropped, 'group')} {'was' if num_dropped == 1 else 'were'} dropped"
        )
    return f"the trainer resumed after step {step}: {repeated} repeated{groups}"
