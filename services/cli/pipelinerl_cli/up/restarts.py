"""When a process has ended: what to do about it. Pure."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pipelinerl_operator.plan import ENDING_ROLES, Role

EXIT_DONE, EXIT_SETTINGS = 0, 2


@dataclass(frozen=True, slots=True)
class Restart:
    reason: str


@dataclass(frozen=True, slots=True)
class Done:
    """The process has done what it was there for."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Starting it again would end the same way."""

    reason: str


def judge(
    role: Role, status: int, *, run_is_finished: Callable[[], bool]
) -> Restart | Done | GiveUp:
    """`status` is the exit status, negative for a signal. Trainers and the evaluator may end by
    themselves, their work done.
    """
    if status == EXIT_SETTINGS:
        return GiveUp("wrong settings")
    if status == EXIT_DONE:
        if role in ENDING_ROLES:
            return Done() if run_is_finished() else Restart("ended before the last step")
        return Restart("ended by itself")
    return Restart(
        f"was killed by signal {-status}" if status < 0 else f"crashed with status {status}"
    )


@dataclass
class RestartBudget:
    """At most `most` restarts within `window_s`; the wait before each doubles with the number of
    recent ones.
    """

    most: int = 5
    window_s: float = 600.0
    first_delay_s: float = 0.5
    _times: deque[float] = field(default_factory=deque)

    def spend(self, now: float) -> float | None:
        """Seconds to wait before the restart, or None when the budget is used up."""
        while self._times and now - self._times[0] > self.window_s:
            self._times.popleft()
        if len(self._times) >= self.most:
            return None
        delay = self.first_delay_s * 2.0 ** len(self._times)
        self._times.append(now)
        return delay
