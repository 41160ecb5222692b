"""NeMo-RL's four samplers over one buffer of groups.

windowed      no gate; stale groups are cancelled at a publish and evicted from the batch
weight_fifo   gated; the oldest start weight among all groups is trained first
ready_first   gated; whatever is ready is trained
in_order      gated; the step that trains a group is fixed when the group is dispatched
"""

from dataclasses import dataclass

from pipelinerl_staleness.checks import flag, optional_whole, whole
from pipelinerl_staleness.groups import GroupPolicy
from pipelinerl_staleness.policy import PolicySettings, Take


@dataclass(frozen=True, slots=True)
class NemoSettings(PolicySettings):
    """Parameters that NeMo-RL's samplers share."""

    eta: int = whole(1, at_least=0)
    """Versions that a group may lag behind its step (NeMo-RL `max_staleness_versions`;
    `max_lookahead_versions` for in_order), at least 0; 0 is on-policy.
    """
    max_buffered_rollouts: int | None = optional_whole(at_least=1)
    """Groups admitted and not taken (NeMo-RL `max_buffered_rollouts`), at least B * (eta + 1);
    unset is that.
    """
    max_inflight_prompts: int | None = optional_whole(at_least=1)
    """Groups that run at once (NeMo-RL `max_inflight_prompts`); unset is the buffer's size."""


class Nemo(GroupPolicy):
    """The buffer, the cap on what runs, and the gate. A group holds a place in the buffer from
    dispatch until it is taken or evicted. The KV cache survives a publish.
    """

    settings: NemoSettings
    keeps_kv = True

    def __init__(self, settings: NemoSettings, groups_per_step: int) -> None:
        super().__init__(settings, groups_per_step)
        least = (settings.eta + 1) * groups_per_step
        self._buffer = (
            least if settings.max_buffered_rollouts is None else settings.max_buffered_rollouts
        )
        if self._buffer < least:
            raise ValueError(
                f"max_buffered_rollouts={self._buffer} must be at least {least}, "
                f"the groups of eta + 1 = {settings.eta + 1} batches, or the pipeline would lock up"
            )
        self._max_running = (
            self._buffer if settings.max_inflight_prompts is None else settings.max_inflight_prompts
        )

    def has_room(self) -> bool:
        return len(self.groups) < self._buffer and len(self.groups.running) < self._max_running

    def max_outstanding(self) -> int:
        return self._buffer


class GatedNemo(Nemo):
    """A sampler with the gate: batch j may start when version j - eta is served."""

    def may_admit(self) -> bool:
        return self.has_room() and self.within_capacity(self.settings.eta)


@dataclass(frozen=True, slots=True)
class NemoWindowedSettings(NemoSettings):
    """NeMo-RL `sampler.name: windowed`."""

    sample_freshest_first: bool = flag(False)
    """Whether the youngest ready groups are trained first (NeMo-RL `sample_freshest_first`), not
    the earliest dispatched.
    """


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


@dataclass(frozen=True, slots=True)
class NemoWeightFifoSettings(NemoSettings):
    """NeMo-RL `sampler.name: weight_fifo`."""


class NemoWeightFifo(GatedNemo):
    """Waits for the oldest stamp among running and ready groups. Strict: at most (w + eta + 1) B
    groups have a stamp of w or less, they are trained before all younger ones, hence by step w +
    eta. NeMo-RL stalls when a stamp has fewer than B groups; here such a batch is completed from
    the next stamp.
    """

    settings_type = NemoWeightFifoSettings

    def take(self, step: int) -> Take:
        if len(self.groups.ready) < self.groups_per_step:
            return self.wait(f"{len(self.groups.ready)} of {self.groups_per_step} groups ready")
        return self.deliver_oldest_first()

    def bound(self) -> int:
        return self.settings.eta

    def min_waiting(self) -> int:
        return self.max_outstanding()


@dataclass(frozen=True, slots=True)
class NemoReadyFirstSettings(NemoSettings):
    """NeMo-RL `sampler.name: ready_first`."""


class NemoReadyFirst(GatedNemo):
    """Takes the B earliest dispatched of the ready groups, whatever their age: no bound except with
    eta = 0.
    """

    settings_type = NemoReadyFirstSettings

    def take(self, step: int) -> Take:
        return self.deliver(self.groups.ready_by_dispatch())

    def bound(self) -> int | None:
        return 0 if self.settings.eta == 0 else None


@dataclass(frozen=True, slots=True)
class NemoInOrderSettings(NemoSettings):
    """NeMo-RL `sampler.name: in_order`; eta is `max_lookahead_versions`."""


class NemoInOrder(GatedNemo):
    """Batch k is the B earliest dispatched of all outstanding groups, waited for to the last one.
    Strict: at most eta.

    When a group fails, later ones move up (NeMo-RL's `promote`), so a step never waits for a group
    that is gone.
    """

    settings_type = NemoInOrderSettings

    def take(self, step: int) -> Take:
        if len(self.groups.ready) < self.groups_per_step:
            return self.wait(f"{len(self.groups.ready)} of {self.groups_per_step} groups ready")
        return self.deliver_in_dispatch_order()

    def bound(self) -> int:
        return self.settings.eta

    def min_waiting(self) -> int:
        return self.max_outstanding()
