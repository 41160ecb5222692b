"""`spec.evaluation`: named sets of prompts on which checkpoints are measured while training
continues.
"""

from typing import Annotated, Self

from pydantic import Field, model_validator

from pipelinerl_common.settings.base import CLUSTER_ONLY, Settings
from pipelinerl_common.settings.kubernetes import Image, PodTemplate
from pipelinerl_common.settings.model import SamplingSettings, TaskArgs, TaskPath
from pipelinerl_common.settings.roles import GeneratorSettings


class EvaluationSetSettings(Settings):
    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=40)]
    """Name of the set in reports."""
    path: TaskPath
    """Class of the set's task as `package.module:Name`."""
    args: TaskArgs = {}
    """Keyword arguments of the task's class."""
    num_prompts: Annotated[int, Field(ge=1, le=100000)] = 200
    """Number N of prompts: the task's prompts 0 to N-1."""
    samples_per_prompt: Annotated[int, Field(ge=1, le=4096)] = 1
    """Number of answers sampled for each prompt."""
    pass_at: Annotated[
        list[Annotated[int, Field(ge=1, le=4096)]], Field(min_length=1, max_length=8)
    ] = [1]
    """Values of k for which pass@k is reported."""
    sampling: SamplingSettings | None = None
    """Sampling parameters. Unset: `task.sampling`."""

    @model_validator(mode="after")
    def _enough_samples(self) -> Self:
        largest = max(self.pass_at)
        if largest > self.samples_per_prompt:
            raise ValueError(
                f"passAt {largest} of the set {self.name!r} needs samplesPerPrompt of at least "
                f"{largest}, not "
                f"{self.samples_per_prompt}"
            )
        if len(set(self.pass_at)) < len(self.pass_at):
            raise ValueError(
                f"passAt={self.pass_at} of the set {self.name!r} names one k twice: leave one of "
                "them out"
            )
        return self


class EvaluationSettings(Settings):
    every_steps: Annotated[int, Field(ge=1)]
    """Optimizer steps between evaluations, a multiple of `trainers.checkpoint.everySteps`. The last
    step is always evaluated.
    """
    at_start: bool = True
    """Evaluates the initial weights too, as step 0."""
    sets: Annotated[list[EvaluationSetSettings], Field(min_length=1, max_length=8)]
    """Sets of prompts, made with another seed than those of training."""
    generator: GeneratorSettings | None = None
    """Engine of the evaluator's generator, which runs only during an evaluation. Unset:
    `actors.generator`.
    """
    gpus_per_replica: Annotated[int, Field(ge=0, le=64)] | None = None
    """Number of GPUs of the evaluator. Unset: `tensorParallelSize` where actors have GPUs,
    otherwise none.
    """
    timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 1800.0
    """Longest time for one evaluation in seconds, the generator's start included."""
    image: Annotated[Image | None, CLUSTER_ONLY] = None
    """Image of this role. Unset: `spec.image`, else the operator's own."""
    pod_template: Annotated[PodTemplate | None, CLUSTER_ONLY] = None
    """Pod metadata and spec, merged by name over the operator's: resources, tolerations, volumes,
    sidecars. Containers: evaluator.
    """

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [each.name for each in self.sets]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"evaluation.sets: several are called {', '.join(map(repr, twice))}; give each a "
                "name of its own"
            )
        return self
