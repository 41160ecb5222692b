"""AReaL's rule: a capacity that grows by one batch per published version, nothing cancelled, nothing dropped."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipelinerl_staleness.policy import Policy, PolicySettings, Take


@dataclass(frozen=True, slots=True)
class ArealSettings(PolicySettings):
    eta: int = 1
    """Batches of head start (AReaL `max_head_offpolicyness`), at least 0; 0 is synchronous."""
    max_concurrent: int | None = None
    """Most groups generated at once (AReaL `max_concurrent_rollouts`); unset is (eta + 1) batches, which never binds."""

    def __post_init__(self) -> None:
        if not isinstance(self.eta, int) or isinstance(self.eta, bool) or self.eta < 0:
            raise ValueError(f"eta={self.eta!r} must be a whole number of at least 0")
        limit = self.max_concurrent
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
            raise ValueError(f"max_concurrent={limit!r} must be a whole number of at least 1")


class Areal(Policy):
    """Admits while min(C - running, (eta + w + 1) B - (accepted + running)) > 0; takes the B earliest started of the
    finished. A slow group can be overtaken for ever, so there is no bound except with eta = 0."""

    settings_type = ArealSettings
    settings: ArealSettings

    def __init__(self, settings: ArealSettings, groups_per_step: int) -> None:
        super().__init__(settings, groups_per_step)
        self._running: dict[str, None] = {}
        self._ready: dict[str, None] = {}
        self._order: dict[str, int] = {}
        self._num_dispatched = 0
        self._num_accepted = 0

    def may_admit(self) -> bool:
        limit = self.settings.max_concurrent
        concurrency = (self.settings.eta + 1) * self.groups_per_step if limit is None else limit
        capacity = (self.settings.eta + self.version + 1) * self.groups_per_step
        return min(concurrency - len(self._running), capacity - self._num_accepted - len(self._running)) > 0

    def admitted(self, group: str) -> None:
        self._running[group] = None
        self._order[group] = self._num_dispatched
        self._num_dispatched += 1

    def finished(self, group: str) -> None:
        if group in self._running:
            del self._running[group]
            self._ready[group] = None
            self._num_accepted += 1

    def lost(self, group: str) -> None:
        if group in self._ready:
            del self._ready[group]
            self._num_accepted -= 1
        self._running.pop(group, None)
        self._order.pop(group, None)

    def take(self, step: int) -> Take:
        if len(self._ready) < self.groups_per_step:
            return Take(wait_reason=f"{len(self._ready)} of {self.groups_per_step} groups ready, {len(self._running)} running")
        chosen = sorted(self._ready, key=self._order.__getitem__)[: self.groups_per_step]
        for group in chosen:
            del self._ready[group]
            del self._order[group]
        return Take(groups=tuple(chosen))

    def recover(self, step: int, version: int) -> None:
        self._running.clear()
        self._ready.clear()
        self._order.clear()
        self._num_accepted = step * self.groups_per_step
        self.version = version

    def bound(self) -> int | None:
        return 0 if self.settings.eta == 0 else None

    def max_outstanding(self) -> int:
        return (self.settings.eta + 1) * self.groups_per_step

    def outstanding(self) -> Sequence[str]:
        return tuple(self._order)
