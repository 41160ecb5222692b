"""SkyRL's rule, fully asynchronous mode: AReaL's capacity, batches in the order of finishing,
violations only counted.
"""

from dataclasses import dataclass

from pipelinerl_staleness.checks import optional_whole, whole
from pipelinerl_staleness.groups import GroupPolicy
from pipelinerl_staleness.policy import PolicySettings, Take


@dataclass(frozen=True, slots=True)
class SkyrlSettings(PolicySettings):
    """Parameters of `skyrl`."""

    max_staleness_steps: int = whole(4, at_least=0)
    """Batches of head start (SkyRL `max_staleness_steps`), at least 0; 0 is synchronous."""
    num_workers: int | None = optional_whole(at_least=1)
    """Groups generated at once (SkyRL `num_parallel_generation_workers`), between B and B *
    (max_staleness_steps + 1); unset is the largest of these.
    """


class Skyrl(GroupPolicy):
    """Admits while min(workers - running, (S + w + 1) B - (accepted + running)) > 0; takes the B
    earliest finished. A group older than S when trained is counted in `num_violations` and trained
    all the same: no bound except with S = 0.
    """

    settings_type = SkyrlSettings
    settings: SkyrlSettings
    keeps_kv = True

    def __init__(self, settings: SkyrlSettings, groups_per_step: int) -> None:
        super().__init__(settings, groups_per_step)
        most = self.max_outstanding()
        self._workers = most if settings.num_workers is None else settings.num_workers
        if not groups_per_step <= self._workers <= most:
            raise ValueError(
                f"num_workers={self._workers} must be between the {groups_per_step} groups of a "
                f"step and {most}, "
                f"which is that times max_staleness_steps + 1"
            )
        self.num_violations = 0

    def may_admit(self) -> bool:
        return len(self.groups.running) < self._workers and self.within_capacity(
            self.settings.max_staleness_steps
        )

    def take(self, step: int) -> Take:
        stamps = dict(self.groups.ready)
        taken = self.deliver(self.groups.ready)
        self.num_violations += sum(
            step - stamps[group] > self.settings.max_staleness_steps for group in taken.groups
        )
        return taken

    def bound(self) -> int | None:
        return 0 if self.settings.max_staleness_steps == 0 else None

    def max_outstanding(self) -> int:
        return (self.settings.max_staleness_steps + 1) * self.groups_per_step
