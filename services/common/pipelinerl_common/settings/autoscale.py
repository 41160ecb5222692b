"""`spec.autoscale`: how many actors there are while the job runs."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipelinerl_common.settings.base import Settings


class AutoscaleSettings(Settings):
    enabled: bool = False
    """Chooses the number of actors between minReplicas and maxReplicas by the ratio of the system's
    throughput to what generation alone would reach. The trainers' number is fixed.
    """
    schedule: Literal["rule", "hybrid"] = "rule"
    """`rule` begins with actors.replicas; `hybrid` with maxReplicas, and goes down to splitShare
    after exploreSteps. From there on both follow the ratio.
    """
    explore_steps: Annotated[int, Field(ge=1, le=1000000)] = 50
    """Optimizer steps of a hybrid schedule during which maxReplicas actors generate."""
    split_share: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Share of the GPUs (actors and trainer ranks on a CPU), those of maxReplicas actors and the
    trainers' together, that a hybrid schedule lets generate after exploreSteps; rounded to whole
    actors.
    """
    period_steps: Annotated[int, Field(ge=1, le=100000)] = 10
    """Optimizer steps between two looks. They count from when every actor is ready."""
    low_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """Below it the trainers hold the generators up, and actors are taken away."""
    high_ratio: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Above it the generators hold the trainers up, and actors are added."""
    take_away_gpus: Annotated[int, Field(ge=1, le=1024)] = 5
    """Most GPUs (actors on a CPU), rounded up to whole actors, that stop generating at a low ratio.
    """
    add_gpus: Annotated[int, Field(ge=1, le=1024)] = 2
    """Most GPUs (actors on a CPU), rounded up to whole actors, that begin to generate at a high
    ratio.
    """

    @model_validator(mode="after")
    def _ratios_rise(self) -> Self:
        if self.low_ratio >= self.high_ratio:
            raise ValueError(
                f"autoscale.lowRatio={self.low_ratio} must be below "
                f"autoscale.highRatio={self.high_ratio}"
            )
        return self
