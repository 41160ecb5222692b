"""`spec.algorithm`: the objective, the optimizer, the batch."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipelinerl_common.settings.base import Settings


class OptimizerSettings(Settings):
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """AdamW's peak learning rate."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 0.3
    """Gradients are scaled down to this global norm."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up, over `steps`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up from 0."""
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Where linear and cosine schedules end, as a share of the peak."""


class KLSettings(Settings):
    coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL penalty (k3 estimator) to the reference model in the loss. Above 0 it needs `spec.reference`."""


class OverlongSettings(Settings):
    completions: Literal["keep", "mask"] = "keep"
    """What a truncated completion (finish reason `length`) contributes: its loss, or nothing (masked)."""
    penalty_buffer_tokens: Annotated[int, Field(ge=0)] = 0
    """Soft penalty: the reward falls linearly from 0 to -1 over this many last tokens before `maxTokens`; 0 is off."""


class AlgorithmSettings(Settings):
    steps: Annotated[int, Field(ge=1)] = 1000
    """Optimizer steps of the run."""
    groups_per_step: Annotated[int, Field(ge=1)] = 128
    """Groups per optimizer step (B); a step trains B times `task.groupSize` trajectories."""
    loss: Literal["reinforce", "ppo", "grpo"] = "reinforce"
    """`reinforce`: truncated importance weights; `ppo`: clipped ratio; `grpo`: clipped ratio with the advantage divided by
    the group's standard deviation."""
    truncation: Annotated[float, Field(gt=0)] = 5.0
    """`reinforce`: importance weights are truncated at this value (c)."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """`ppo` and `grpo`: the ratio is clipped below 1 minus this."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """`ppo` and `grpo`: the ratio is clipped above 1 plus this."""
    baseline: Literal["leave_one_out", "value"] = "leave_one_out"
    """What is subtracted from the reward: the mean of the group's other trajectories, or a learned value head."""
    value_coefficient: Annotated[float, Field(ge=0)] = 0.1
    """Weight of the value head's squared error in the loss, with `baseline: value`."""
    normalize_by: Literal["sequences", "tokens"] = "sequences"
    """The loss is a sum over tokens divided by the step's number of sequences (the paper) or of trained tokens."""
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    kl: KLSettings = KLSettings()
    """Closeness to a reference model."""
    overlong: OverlongSettings = OverlongSettings()
    """What becomes of completions that are too long."""
    drop_zero_advantage: bool = False
    """Groups whose trajectories all have the same reward are dropped before batching, and their slots given back."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """AdamW and the schedule of its learning rate."""

    @model_validator(mode="after")
    def _warmup_fits(self) -> "AlgorithmSettings":
        if self.optimizer.warmup_steps > self.steps:
            raise ValueError(f"optimizer.warmupSteps={self.optimizer.warmup_steps} is more than steps={self.steps}")
        return self

    @model_validator(mode="after")
    def _one_baseline(self) -> "AlgorithmSettings":
        if self.loss == "grpo" and self.baseline == "value":
            raise ValueError(
                "loss=grpo divides by the group's standard deviation and has no value head, but baseline=value: "
                "choose loss=ppo, or baseline=leave_one_out"
            )
        return self
