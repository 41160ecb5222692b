"""The time in which a run generated or trained."""

import bisect
import math


class TrainingTime:
    """Maps clock time to seconds of it: of every session from its first token or step to its last.

    Example: sessions that generated or trained from 10 to 16 and from 100 to 120 make 26 s, and 110
    lies at 16 s.
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
        """Seconds of it up to clock time `time`."""
        return sum(
            max(0.0, min(time, end) - start)
            for start, end in zip(self._starts, self._ends, strict=True)
        )

    def holds(self, time: float) -> bool:
        """Whether the run generated or trained at clock time `time`."""
        session = bisect.bisect_right(self._starts, time) - 1
        return session >= 0 and time <= self._ends[session]
