"""Conventional RL: generate `steps_per_generation` batches at once, train them all, publish, generate again."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipelinerl_staleness.policy import Policy, PolicySettings, Take


@dataclass(frozen=True, slots=True)
class ConventionalSettings(PolicySettings):
    steps_per_generation: int = 1
    """Optimizer steps trained on one generation phase (the paper's G), at least 1; 1 is strictly on-policy."""

    def __post_init__(self) -> None:
        steps = self.steps_per_generation
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise ValueError(f"steps_per_generation={steps!r} must be a whole number of at least 1")


class Conventional(Policy):
    """One phase: B * G_steps groups are admitted at once and none after; when all have finished they are trained in the
    order in which they finished; the weights are published after the last of the phase's steps, which opens the next."""

    settings_type = ConventionalSettings
    settings: ConventionalSettings

    def __init__(self, settings: ConventionalSettings, groups_per_step: int) -> None:
        super().__init__(settings, groups_per_step)
        self._running: dict[str, None] = {}
        self._ready: dict[str, None] = {}
        self._num_taken = 0

    def may_admit(self) -> bool:
        phase = self.version // self.settings.steps_per_generation
        admitted = self._num_taken + len(self._ready) + len(self._running)
        return admitted < (phase + 1) * self.max_outstanding()

    def admitted(self, group: str) -> None:
        self._running[group] = None

    def finished(self, group: str) -> None:
        if group in self._running:
            del self._running[group]
            self._ready[group] = None

    def lost(self, group: str) -> None:
        self._running.pop(group, None)
        self._ready.pop(group, None)

    def take(self, step: int) -> Take:
        left = self.max_outstanding() - self._num_taken % self.max_outstanding()
        if len(self._ready) < left:
            return Take(wait_reason=f"{len(self._ready)} of {left} groups of the phase ready, {len(self._running)} running")
        chosen = tuple(self._ready)[: self.groups_per_step]
        for group in chosen:
            del self._ready[group]
        self._num_taken += len(chosen)
        return Take(groups=chosen)

    def publishes_after(self, step: int) -> bool:
        return (step + 1) % self.settings.steps_per_generation == 0

    def recover(self, step: int, version: int) -> None:
        self._running.clear()
        self._ready.clear()
        self._num_taken = step * self.groups_per_step
        self.version = version

    def bound(self) -> int | None:
        return self.settings.steps_per_generation - 1

    def max_outstanding(self) -> int:
        return self.settings.steps_per_generation * self.groups_per_step

    def min_waiting(self) -> int:
        return self.max_outstanding()

    def outstanding(self) -> Sequence[str]:
        return (*self._ready, *self._running)
