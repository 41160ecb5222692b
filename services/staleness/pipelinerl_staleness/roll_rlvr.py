"""ROLL's scheduler for verifiable rewards as its code has it: each start step is used up before the
next one.
"""

from dataclasses import dataclass

from pipelinerl_staleness.oldest_class import take_oldest_class
from pipelinerl_staleness.policy import Take
from pipelinerl_staleness.roll import Roll, RollSettings


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
        chosen = take_oldest_class(self.groups, self.groups_per_step)
        if isinstance(chosen, int):
            return self.wait(f"groups started at version {chosen} come first", dropped)
        return self.deliver(chosen, dropped)

    def min_waiting(self) -> int:
        return self.max_outstanding()
