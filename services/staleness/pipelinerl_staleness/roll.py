"""ROLL's asynchronous generation: one ratio rules admission, cancelling and the batch.

roll        as the comparison article models it: stale groups are filtered out
roll_rlvr   the scheduler for verifiable rewards, as its code has it: each start step is used up
            before the next one
"""

from dataclasses import dataclass

from pipelinerl_staleness.checks import whole
from pipelinerl_staleness.groups import GroupPolicy
from pipelinerl_staleness.policy import PolicySettings, Take


@dataclass(frozen=True, slots=True)
class RollSettings(PolicySettings):
    """Parameters of `roll`."""

    rho: int = whole(0, at_least=0)
    """Oldest age of a trained group in versions (ROLL `async_generation_ratio`), at least 0; 0 is
    synchronous.
    """


class Roll(GroupPolicy):
    """Admits (rho + 1 + w) B groups in all; a publish of v cancels running groups stamped before v
    - rho; a batch takes the finished stamps from k - rho on, oldest first, by order of finishing
    within a stamp, and drops older ones.
    """

    settings_type = RollSettings
    settings: RollSettings

    def may_admit(self) -> bool:
        return self.within_capacity(self.settings.rho)

    def published(self, version: int) -> tuple[str, ...]:
        super().published(version)
        return self.cancel(self.groups.running_before(self.version - self.settings.rho))

    def take(self, step: int) -> Take:
        dropped = self.cancel(self.groups.ready_before(step - self.settings.rho))
        return self.deliver(sorted(self.groups.ready, key=self.groups.ready.__getitem__), dropped)

    def bound(self) -> int:
        return self.settings.rho

    def max_outstanding(self) -> int:
        return (self.settings.rho + 1) * self.groups_per_step


@dataclass(frozen=True, slots=True)
class RollRlvrSettings(RollSettings):
    """ROLL `async_generation_ratio`, whole numbers."""


class RollRlvr(Roll):
    """Admission and cancelling as in `roll`, but the batch blocks on every older start step in
    turn. With whole ratios this is the same as `nemo_weight_fifo`: nothing is ever old enough to be
    cancelled or dropped.
    """

    settings_type = RollRlvrSettings

    def take(self, step: int) -> Take:
        dropped = self.cancel(self.groups.ready_before(step - self.settings.rho))
        return self.deliver_oldest_first(dropped)

    def min_waiting(self) -> int:
        return self.max_outstanding()
