"""NeMo-RL's `in_order` sampler: the step that trains a group is fixed when the group is dispatched."""

from dataclasses import dataclass

from pipelinerl_staleness.nemo import Nemo, NemoSettings
from pipelinerl_staleness.policy import Take


@dataclass(frozen=True, slots=True)
class NemoInOrderSettings(NemoSettings):
    """NeMo-RL `sampler.name: in_order`; eta is `max_lookahead_versions`."""


class NemoInOrder(Nemo):
    """Batch k is the B earliest dispatched of all outstanding groups, waited for to the last one.
    Strict: at most eta.

    When a group fails, later ones move up (NeMo-RL's `promote`), so a step never waits for a group
    that is gone.
    """

    settings_type = NemoInOrderSettings

    def may_admit(self) -> bool:
        return self.gate_is_open()

    def take(self, step: int) -> Take:
        if len(self.groups.ready) < self.groups_per_step:
            return self.wait(f"{len(self.groups.ready)} of {self.groups_per_step} groups ready")
        return self.deliver_in_dispatch_order()

    def bound(self) -> int:
        return self.settings.eta

    def min_waiting(self) -> int:
        return self.max_outstanding()
