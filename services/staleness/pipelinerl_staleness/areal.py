"""AReaL's rule: a capacity that grows by one batch per published version, nothing cancelled,
nothing dropped.
"""

from dataclasses import dataclass

from pipelinerl_staleness.checks import optional_whole, whole
from pipelinerl_staleness.groups import GroupPolicy
from pipelinerl_staleness.policy import PolicySettings, Take


@dataclass(frozen=True, slots=True)
class ArealSettings(PolicySettings):
    """Parameters of `areal`."""

    eta: int = whole(1, at_least=0)
    """Batches of head start (AReaL `max_head_offpolicyness`), at least 0; 0 is synchronous."""
    max_concurrent: int | None = optional_whole(at_least=1)
    """Most groups generated at once (AReaL `max_concurrent_rollouts`); unset is (eta + 1) batches,
    which never binds.
    """


class Areal(GroupPolicy):
    """Admits while min(C - running, (eta + w + 1) B - (accepted + running)) > 0; takes the B
    earliest started of the finished. A slow group can be overtaken indefinitely, so there is no
    bound except with eta = 0.
    """

    settings_type = ArealSettings
    settings: ArealSettings

    def may_admit(self) -> bool:
        limit = self.settings.max_concurrent
        return self.within_capacity(self.settings.eta) and (
            limit is None or len(self.groups.running) < limit
        )

    def take(self, step: int) -> Take:
        return self.deliver(self.groups.ready_by_dispatch())

    def bound(self) -> int | None:
        return 0 if self.settings.eta == 0 else None

    def max_outstanding(self) -> int:
        return (self.settings.eta + 1) * self.groups_per_step
