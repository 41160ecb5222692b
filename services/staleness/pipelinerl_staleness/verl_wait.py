"""verl's `wait` strategy: the trainer waits for running groups at the threshold; nothing is
dropped.
"""

from dataclasses import dataclass
from math import ceil

from pipelinerl_staleness.policy import Take
from pipelinerl_staleness.verl import Verl, VerlSettings


@dataclass(frozen=True, slots=True)
class VerlWaitSettings(VerlSettings):
    """verl `max_off_policy_strategy: wait`."""


class VerlWait(Verl):
    """Waits while a running group has span >= eta, then takes the B oldest stamps of the finished.

    A finished group blocks nothing, so the bound is not eta - 1 but max(W, eta + W - 2): when
    version a is first used, at most W B groups of stamp <= a remain, at version a + eta - 1 all of
    those have finished, and W batches, oldest stamps first, use them up. The bound is attained.
    """

    settings_type = VerlWaitSettings

    def take(self, step: int) -> Take:
        if len(self.groups.ready) < self.groups_per_step:
            return self.wait(f"{len(self.groups.ready)} of {self.groups_per_step} groups ready")
        running = self.groups.num_running_by_stamp
        blocking = sum(
            number
            for stamp, number in running.items()
            if self.span(stamp, step) >= self.settings.eta
        )
        if blocking:
            return self.wait(f"{blocking} running groups reach the threshold {self.settings.eta}")
        return self.deliver(self.groups.ready_by_stamp())

    def bound(self) -> int:
        warmup = ceil(self.settings.num_warmup_batches)
        return max(warmup, self.settings.eta + warmup - 2)

    def min_waiting(self) -> int:
        return self.max_outstanding()
