"""Controllers of the number of GPUs that generate while a job runs. Pure state machines: the caller
observes, asks, and acts.

`ShareRule`        I follows the ratio of system throughput to generation throughput
`HybridSchedule`   all GPUs generate at first; later a share of them, which the rule may adjust

The numbers are rules of thumb of users of in-flight RL, not results.
"""

from dataclasses import dataclass, replace
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class ShareRuleSettings:
    """Settings of the share rule; the defaults are the rule of thumb. Example: of 128 GPUs 42
    generate at first.
    """

    num_gpus: int
    """N, at least 2."""
    period_steps: int = 10
    """Optimizer steps between two decisions."""
    low_ratio: float = 0.9
    """Below it the trainers limit the generators."""
    high_ratio: float = 0.95
    """Above it the generators limit the trainers. Between the two nothing changes."""
    take_away: int = 5
    """GPUs that stop generating at a low ratio."""
    add: int = 2
    """GPUs that start to generate at a high ratio."""
    largest_start: int = 64
    """I starts at a third of the GPUs, at most this."""
    least: int = 1
    """Fewest GPUs that generate."""
    least_training: int = 1
    """Fewest GPUs that train."""

    def __post_init__(self) -> None:
        if (
            self.least < 1
            or self.least_training < 1
            or self.least + self.least_training > self.num_gpus
        ):
            raise ValueError(
                f"num_gpus={self.num_gpus} must hold least={self.least} and "
                f"least_training={self.least_training}, each at least 1"
            )
        if not 0 < self.low_ratio < self.high_ratio <= 1:
            raise ValueError(
                f"low_ratio={self.low_ratio} and high_ratio={self.high_ratio} must rise within 0 "
                "to 1"
            )
        if min(self.period_steps, self.take_away, self.add, self.largest_start) < 1:
            raise ValueError(
                f"period_steps={self.period_steps}, take_away={self.take_away}, add={self.add} and "
                f"largest_start={self.largest_start} must be at least 1"
            )

    @property
    def most(self) -> int:
        """Most GPUs that generate."""
        return self.num_gpus - self.least_training

    def clamped(self, num_generating: int) -> int:
        return min(max(num_generating, self.least), self.most)


@dataclass(frozen=True, slots=True)
class Share:
    """A controller's decision. Example: Share(num_generating=42, decided_at=10)."""

    num_generating: int
    """I"""
    decided_at: int
    """Optimizer step of the decision."""


@dataclass(frozen=True, slots=True)
class ShareRule:
    """Adjusts I, which starts at min(N // 3, 64). Every 10 steps r / r_gen is compared: below 0.9
    five GPUs stop generating, above 0.95 two start, always within the bounds.
    """

    settings: ShareRuleSettings

    def initial(self) -> Share:
        settings = self.settings
        return Share(settings.clamped(min(settings.num_gpus // 3, settings.largest_start)), 0)

    def observe(self, share: Share, step: int, r: float, r_gen: float) -> Share:
        """Returns the share after `step` optimizer steps, for throughputs of the system and of
        generation alone in any common unit.

        A step before the last decision (the trainer returned to a checkpoint) starts a new period.
        Without generation (r_gen of 0) the balance is unknown and nothing changes.
        """
        settings = self.settings
        if step < share.decided_at:
            return replace(share, decided_at=step)
        if step - share.decided_at < settings.period_steps:
            return share
        return Share(settings.clamped(share.num_generating + self._change(r, r_gen)), step)

    def _change(self, r: float, r_gen: float) -> int:
        if r_gen <= 0:
            return 0
        ratio = r / r_gen
        if ratio < self.settings.low_ratio:
            return -self.settings.take_away
        return self.settings.add if ratio > self.settings.high_ratio else 0


class HybridPhase(StrEnum):
    """The phases of a hybrid schedule."""

    EXPLORE = "explore"
    """All GPUs generate, and train in turns."""
    SPLIT = "split"
    """A share of the GPUs generates while the others train."""


@dataclass(frozen=True, slots=True)
class HybridSettings:
    """Settings of a hybrid schedule. Example: all of 128 GPUs generate for 50 steps, then 38 do."""

    rule: ShareRuleSettings
    """Bounds, and how the share is adjusted once there is one."""
    explore_steps: int
    """Optimizer steps during which all GPUs generate."""
    split_share: float = 0.3
    """I / N at the beginning of the second phase."""
    adjust: bool = True
    """Whether the rule adjusts the share in the second phase."""

    def __post_init__(self) -> None:
        if self.explore_steps < 0:
            raise ValueError(f"explore_steps={self.explore_steps} must be at least 0")
        if not 0 < self.split_share < 1:
            raise ValueError(f"split_share={self.split_share} must be between 0 and 1")


@dataclass(frozen=True, slots=True)
class HybridState:
    """The state of a hybrid schedule."""

    phase: HybridPhase
    share: Share


@dataclass(frozen=True, slots=True)
class HybridSchedule:
    """EXPLORE until `explore_steps`, then SPLIT for the rest of the job, also after a return to an
    earlier checkpoint.
    """

    settings: HybridSettings

    def initial(self) -> HybridState:
        if self.settings.explore_steps == 0:
            return self._split(0)
        return HybridState(HybridPhase.EXPLORE, Share(self.settings.rule.num_gpus, 0))

    def observe(self, state: HybridState, step: int, r: float, r_gen: float) -> HybridState:
        """Returns the state after `step` optimizer steps; arguments as of `ShareRule.observe`."""
        if state.phase is HybridPhase.EXPLORE:
            return self._split(step) if step >= self.settings.explore_steps else state
        if not self.settings.adjust:
            return state
        return replace(
            state, share=ShareRule(self.settings.rule).observe(state.share, step, r, r_gen)
        )

    def _split(self, step: int) -> HybridState:
        rule = self.settings.rule
        return HybridState(
            HybridPhase.SPLIT,
            Share(rule.clamped(round(self.settings.split_share * rule.num_gpus)), step),
        )
