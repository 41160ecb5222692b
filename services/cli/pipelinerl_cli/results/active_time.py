"""Time of a run over its sessions."""

import bisect

from pipelinerl_cli.results.metrics_file import Record

SESSION_START = "session_started"
"""Name of the value that marks the first record of a session."""


class ActiveTime:
    """Maps clock time to seconds of the run: a run that was stopped for an hour and resumed is not
    an hour longer.

    Fed with all records in their order, and right for those that it was fed with.
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
        into = time - self._starts[session]
        return self._offsets[session] + (
            into if session == len(self._starts) - 1 else min(into, self._length(session))
        )

    @property
    def total(self) -> float:
        return self._offsets[-1] + self._length(-1) if self._starts else 0.0

    @property
    def session_start(self) -> float | None:
        """Clock time at which the newest session began."""
        return self._starts[-1] if self._starts else None

    def _length(self, session: int) -> float:
        return max(0.0, self._ends[session] - self._starts[session])
