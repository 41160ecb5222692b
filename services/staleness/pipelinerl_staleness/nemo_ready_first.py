"""NeMo-RL's `ready_first` sampler: gated admission, then whatever is ready."""

from dataclasses import dataclass

from pipelinerl_staleness.nemo import Nemo, NemoSettings
from pipelinerl_staleness.policy import Take


@dataclass(frozen=True, slots=True)
class NemoReadyFirstSettings(NemoSettings):
    """NeMo-RL `sampler.name: ready_first`."""


class NemoReadyFirst(Nemo):
    """Takes the B earliest dispatched of the ready groups, whatever their age: no bound except with
    eta = 0.
    """

    settings_type = NemoReadyFirstSettings

    def may_admit(self) -> bool:
        return self.gate_is_open()

    def take(self, step: int) -> Take:
        if len(self.groups.ready) < self.groups_per_step:
            return self.wait(f"{len(self.groups.ready)} of {self.groups_per_step} groups ready")
        return self.deliver(self.groups.ready_by_dispatch())

    def bound(self) -> int | None:
        return 0 if self.settings.eta == 0 else None
