"""NeMo-RL's `weight_fifo` sampler: the oldest start weight among all groups is trained first;
nothing is dropped.
"""

from dataclasses import dataclass

from pipelinerl_staleness.nemo import Nemo, NemoSettings
from pipelinerl_staleness.oldest_class import take_oldest_class
from pipelinerl_staleness.policy import Take


@dataclass(frozen=True, slots=True)
class NemoWeightFifoSettings(NemoSettings):
    """NeMo-RL `sampler.name: weight_fifo`."""


class NemoWeightFifo(Nemo):
    """Waits for the oldest stamp among running and ready groups. Strict: at most (w + eta + 1) B
    groups have a stamp of w or less, they are trained before all younger ones, hence by step w +
    eta. NeMo-RL stalls when a stamp has fewer than B groups; here such a batch is completed from
    the next stamp.
    """

    settings_type = NemoWeightFifoSettings

    def may_admit(self) -> bool:
        return self.gate_is_open()

    def take(self, step: int) -> Take:
        if len(self.groups.ready) < self.groups_per_step:
            return self.wait(f"{len(self.groups.ready)} of {self.groups_per_step} groups ready")
        chosen = take_oldest_class(self.groups, self.groups_per_step)
        if isinstance(chosen, int):
            return self.wait(f"groups started at version {chosen} come first")
        return self.deliver(chosen)

    def bound(self) -> int:
        return self.settings.eta

    def min_waiting(self) -> int:
        return self.max_outstanding()
