"""`spec.evaluation`: named sets of prompts, on which checkpoints are measured while training goes
on.
"""

from typing import Annotated, Self

from pydantic import Field, model_validator

from pipelinerl_common.settings.base import CLUSTER_ONLY, Settings
from pipelinerl_common.settings.kubernetes import Image, PodTemplate
from pipelinerl_common.settings.model import SamplingSettings, TaskArgs, TaskPath
from pipelinerl_common.settings.roles import GeneratorSettings


class EvaluationSetSettings(Settings):
    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=40)]
    """What its numbers are called."""
    path: TaskPath
    """Class of a task, as task.path."""
    args: TaskArgs = {}
    """Its keyword arguments."""
    num_prompts: Annotated[int, Field(ge=1, le=100000)] = 200
    """Prompts 0 to N-1 of the task."""
    samples_per_prompt: Annotated[int, Field(ge=1, le=4096)] = 1
    """Answers to each."""
    pass_at: Annotated[
        list[Annotated[int, Field(ge=1, le=4096)]], Field(min_length=1, max_length=8)
    ] = [1]
    """Which pass@k are told."""
    sampling: SamplingSettings | None = None
    """Unset takes task.sampling."""

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
    """Steps between evaluations, a multiple of trainers.checkpoint.everySteps. The last step is
    always evaluated.
    """
    at_start: bool = True
    """Whether the initial weights are evaluated too, as step 0."""
    sets: Annotated[list[EvaluationSetSettings], Field(min_length=1, max_length=8)]
    """What is measured. Another seed than training's makes their prompts."""
    generator: GeneratorSettings | None = None
    """The engine, which runs only while something is evaluated; unset takes actors.generator."""
    gpus_per_replica: Annotated[int, Field(ge=0, le=64)] | None = None
    """GPUs; unset gives it tensorParallelSize where actors have GPUs, and none where they have
    none.
    """
    timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 1800.0
    """Longest time for one evaluation, its generator's start included."""
    image: Annotated[Image | None, CLUSTER_ONLY] = None
    """Image of this role; unset takes spec.image, and without that the operator's."""
    pod_template: Annotated[PodTemplate | None, CLUSTER_ONLY] = None
    """metadata and spec of a pod, laid over the operator's own by name. Container: evaluator."""

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
