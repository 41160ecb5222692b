"""slime's fully asynchronous rollout: a prefetch depth for groups, nothing about versions."""

from dataclasses import dataclass

from pipelinerl_staleness.checks import number, optional_whole, whole
from pipelinerl_staleness.groups import GroupPolicy
from pipelinerl_staleness.policy import PolicySettings, Take


@dataclass(frozen=True, slots=True)
class SlimeSettings(PolicySettings):
    """Parameters of `slime`."""

    prefetch_factor: float = number(1.0, at_least=0, above=True)
    """Groups at once as a multiple of what fills the engines (slime
    `fully_async_group_prefetch_factor`), above 0.
    """
    concurrency: int | None = optional_whole(at_least=1)
    """Trajectories decoded at once by all engines together (the sum of slime's
    `sglang_server_concurrency`); unset is one batch of them.
    """
    group_size: int = whole(8, at_least=1)
    """Trajectories per group (slime `n_samples_per_prompt`)."""


class Slime(GroupPolicy):
    """Admits while fewer than C groups run and fewer than C finished ones wait, C = f * concurrency
    / G; takes the B earliest finished. The next batch is complete before the weights of this one
    are published, so the engines never see new weights while the trainer waits. A publish aborts
    every request; groups continue from the tokens they have.

    The second gate is at least B wide, because a depth below one batch would otherwise never fill a
    batch.
    """

    settings_type = SlimeSettings
    settings: SlimeSettings

    def __init__(self, settings: SlimeSettings, groups_per_step: int) -> None:
        super().__init__(settings, groups_per_step)
        unset = settings.concurrency is None
        self._concurrency = (
            groups_per_step * settings.group_size
            if settings.concurrency is None
            else settings.concurrency
        )
        groups = settings.prefetch_factor * (
            groups_per_step if unset else self._concurrency / settings.group_size
        )
        self._max_active = max(1, int(groups))
        self._max_queue = max(self._max_active, groups_per_step)

    def may_admit(self) -> bool:
        return (
            len(self.groups.running) < self._max_active and len(self.groups.ready) < self._max_queue
        )

    def take(self, step: int) -> Take:
        return self.deliver(self.groups.ready)

    def may_publish(self) -> bool:
        """Also when nothing runs: then the data has ended and the next batch will never be
        complete.
        """
        return len(self.groups.ready) >= self.groups_per_step or not self.groups.running

    def trajectory_limit(self) -> int | None:
        return self._concurrency

    def bound(self) -> None:
        return None

    def max_outstanding(self) -> int:
        return self._max_active + self._max_queue - 1
