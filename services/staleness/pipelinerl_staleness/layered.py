"""The comparison article's ablation: AReaL's admission, ROLL's cancelling and verl's filter, each
on or off.
"""

from dataclasses import dataclass

from pipelinerl_staleness.checks import flag, whole
from pipelinerl_staleness.groups import GroupPolicy
from pipelinerl_staleness.policy import PolicySettings, Take


@dataclass(frozen=True, slots=True)
class LayeredSettings(PolicySettings):
    """Parameters of `layered`."""

    eta: int = whole(1, at_least=0)
    """Versions: head start of layer 1 and age limit of layers 2 and 3, at least 0."""
    layer1: bool = flag(True)
    """Admission by the capacity law. Off: eta + 1 batches may run, eta + 2 batches may wait."""
    layer2: bool = flag(True)
    """At a publish of v, cancel running groups stamped before v - eta."""
    layer3: bool = flag(True)
    """At batch assembly, drop finished groups stamped before k - eta."""


class Layered(GroupPolicy):
    """Takes the B earliest started of the finished. Only layer 3 makes the bound strict: layer 2
    leaves alone what has finished and waits, layer 1 lets a slow group be overtaken indefinitely.
    """

    settings_type = LayeredSettings
    settings: LayeredSettings

    def may_admit(self) -> bool:
        if self.settings.layer1:
            return self.within_capacity(self.settings.eta)
        batch = self.groups_per_step
        running, ready = len(self.groups.running), len(self.groups.ready)
        return running < (self.settings.eta + 1) * batch and ready < (self.settings.eta + 2) * batch

    def published(self, version: int) -> tuple[str, ...]:
        super().published(version)
        stale = (
            self.groups.running_before(self.version - self.settings.eta)
            if self.settings.layer2
            else ()
        )
        return self.cancel(stale)

    def take(self, step: int) -> Take:
        stale = self.groups.ready_before(step - self.settings.eta) if self.settings.layer3 else ()
        dropped = self.cancel(stale)
        return self.deliver(self.groups.ready_by_dispatch(), dropped)

    def bound(self) -> int | None:
        if self.settings.layer3:
            return self.settings.eta
        return 0 if self.settings.layer1 and self.settings.eta == 0 else None

    def max_outstanding(self) -> int:
        ahead = self.settings.eta + 1 if self.settings.layer1 else 2 * self.settings.eta + 3
        return ahead * self.groups_per_step
