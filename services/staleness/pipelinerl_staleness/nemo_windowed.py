"""NeMo-RL's `windowed` sampler: no gate, stale groups are cancelled and evicted."""

from dataclasses import dataclass

from pipelinerl_staleness.checks import check_flag
from pipelinerl_staleness.nemo import Nemo, NemoSettings
from pipelinerl_staleness.policy import Take


@dataclass(frozen=True, slots=True)
class NemoWindowedSettings(NemoSettings):
    sample_freshest_first: bool = False
    """Whether the youngest ready groups are trained first (NeMo-RL `sample_freshest_first`), not
    the earliest dispatched.
    """

    def __post_init__(self) -> None:
        NemoSettings.__post_init__(self)
        check_flag("sample_freshest_first", self.sample_freshest_first)


class NemoWindowed(Nemo):
    """Admission knows the buffer and the running cap only. A publish cancels running groups stamped
    before v - eta, a batch evicts ready ones stamped before k - eta. Strict: at most eta, paid with
    drops.
    """

    settings_type = NemoWindowedSettings
    settings: NemoWindowedSettings

    def may_admit(self) -> bool:
        return self.has_room()

    def published(self, version: int) -> tuple[str, ...]:
        super().published(version)
        return self.cancel(self.groups.running_before(self.version - self.settings.eta))

    def take(self, step: int) -> Take:
        dropped = self.cancel(self.groups.ready_before(step - self.settings.eta))
        candidates = self.groups.ready_by_dispatch()
        if self.settings.sample_freshest_first:
            candidates.sort(key=lambda group: -self.groups.ready[group])
        return self.deliver(candidates, dropped)

    def bound(self) -> int:
        return self.settings.eta
