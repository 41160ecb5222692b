"""What NeMo-RL's four samplers share: the buffer, the cap on what runs, and the gate of the gated
ones.
"""

from dataclasses import dataclass

from pipelinerl_staleness.checks import check_optional_whole, check_whole
from pipelinerl_staleness.groups import GroupPolicy
from pipelinerl_staleness.policy import PolicySettings


@dataclass(frozen=True, slots=True)
class NemoSettings(PolicySettings):
    eta: int = 1
    """Versions that a group may lag behind its step (NeMo-RL `max_staleness_versions`;
    `max_lookahead_versions` for in_order), at least 0; 0 is on-policy.
    """
    max_buffered_rollouts: int | None = None
    """Groups admitted and not taken (NeMo-RL `max_buffered_rollouts`), at least B * (eta + 1);
    unset is that.
    """
    max_inflight_prompts: int | None = None
    """Groups that run at once (NeMo-RL `max_inflight_prompts`); unset is the buffer's size."""

    def __post_init__(self) -> None:
        check_whole("eta", self.eta, 0)
        check_optional_whole("max_buffered_rollouts", self.max_buffered_rollouts, 1)
        check_optional_whole("max_inflight_prompts", self.max_inflight_prompts, 1)


class Nemo(GroupPolicy):
    """A group holds a place in the buffer from dispatch until it is taken or evicted. The KV cache
    survives a publish.
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

    def gate_is_open(self) -> bool:
        """Batch j may start when version j - eta is served."""
        return self.has_room() and self.within_capacity(self.settings.eta)

    def max_outstanding(self) -> int:
        return self._buffer
