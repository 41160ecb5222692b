"""TRL's asynchronous GRPO: a cap on what runs, and a filter on what comes out of the queue."""

from dataclasses import dataclass

from pipelinerl_staleness.checks import choice, flag, whole
from pipelinerl_staleness.groups import TrajectoryPolicy
from pipelinerl_staleness.policy import PolicySettings, Take


@dataclass(frozen=True, slots=True)
class TrlSettings(PolicySettings):
    """Parameters of `trl`."""

    eta: int = whole(4, at_least=0)
    """Oldest age of a group that is trained, in versions (TRL `max_staleness`), at least 0. Also
    the number of batches that may run at once, at least one (TRL `max_inflight_tasks=-1`).
    """
    slots: str = choice("group", "trajectory")
    """`group`: a slot is held until the whole group has finished. `trajectory`: each trajectory
    frees its own (TRL).
    """
    group_size: int = whole(8, at_least=1)
    """Trajectories per group (TRL `num_generations`); counts only with slots=trajectory."""
    queue_groups: int = whole(144, at_least=1)
    """Finished groups that wait at most before generation blocks (TRL: 16 to be scored and
    `queue_maxsize=1024` rows).
    """
    prefetch: bool = flag(False)
    """Whether the batch is checked one publish before it is trained, as a prefetching data loader
    does: the bound is then eta + 1.
    """


class Trl(TrajectoryPolicy):
    """Running work is capped at max(eta, 1) batches and finished groups do not count, so generation
    runs ahead of the trainer and pays with drops. Queue order is the order of finishing; older than
    eta at the queue's head is dropped.
    """

    settings_type = TrlSettings
    settings: TrlSettings

    def __init__(self, settings: TrlSettings, groups_per_step: int) -> None:
        super().__init__(settings, groups_per_step)
        self._max_running = max(settings.eta, 1) * groups_per_step
        self._queue = max(settings.queue_groups, groups_per_step)

    def may_admit(self) -> bool:
        if len(self.groups.ready) >= self._queue:
            return False
        if self.settings.slots == "group":
            return len(self.groups.running) < self._max_running
        return self.num_in_flight < self._max_running * self.settings.group_size

    def trajectory_limit(self) -> int | None:
        return (
            self._max_running * self.settings.group_size
            if self.settings.slots == "trajectory"
            else None
        )

    def take(self, step: int) -> Take:
        oldest = step - self.settings.eta - (1 if self.settings.prefetch else 0)
        usable: list[str] = []
        stale: list[str] = []
        for group, stamp in self.groups.ready.items():
            if len(usable) == self.groups_per_step:
                break
            (stale if stamp < oldest else usable).append(group)
        return self.deliver(usable, self.cancel(tuple(stale)))

    def bound(self) -> int:
        return self.settings.eta + (1 if self.settings.prefetch else 0)

    def max_outstanding(self) -> int:
        ahead = 1 if self.settings.slots == "group" else self.settings.group_size
        return self._queue - 1 + self._max_running * ahead
