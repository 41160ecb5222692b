"""Conventional RL: generate `steps_per_generation` batches at once, train them all, publish,
generate again.
"""

from dataclasses import dataclass

from pipelinerl_staleness.checks import whole
from pipelinerl_staleness.groups import GroupPolicy
from pipelinerl_staleness.policy import PolicySettings, Take


@dataclass(frozen=True, slots=True)
class ConventionalSettings(PolicySettings):
    """Parameters of `conventional`."""

    steps_per_generation: int = whole(1, at_least=1)
    """Optimizer steps trained on one generation phase (the paper's G), at least 1; 1 is strictly
    on-policy.
    """


class Conventional(GroupPolicy):
    """One phase: B * G_steps groups are admitted at once and none after; when all have finished
    they are trained in the order in which they finished; the weights are published after the last
    of the phase's steps, which opens the next.
    """

    settings_type = ConventionalSettings
    settings: ConventionalSettings

    def may_admit(self) -> bool:
        phase = self.version // self.settings.steps_per_generation
        return self.num_taken + len(self.groups) < (phase + 1) * self.max_outstanding()

    def take(self, step: int) -> Take:
        left = self.max_outstanding() - self.num_taken % self.max_outstanding()
        if len(self.groups.ready) < left:
            return self.wait(f"{len(self.groups.ready)} of {left} groups of the phase ready")
        return self.deliver(self.groups.ready)

    def publishes_after(self, step: int) -> bool:
        return (step + 1) % self.settings.steps_per_generation == 0

    def bound(self) -> int | None:
        return self.settings.steps_per_generation - 1

    def max_outstanding(self) -> int:
        return self.settings.steps_per_generation * self.groups_per_step

    def min_waiting(self) -> int:
        return self.max_outstanding()
