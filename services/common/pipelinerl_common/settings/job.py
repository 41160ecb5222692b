"""The job file: `PipelineRLJob`, the same for `pipelinerl up` and for `kubectl apply`."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipelinerl_common.settings.algorithm import AlgorithmSettings
from pipelinerl_common.settings.base import Settings
from pipelinerl_common.settings.model import ModelSettings, TaskSettings
from pipelinerl_common.settings.roles import (
    ActorSettings,
    PreprocessorSettings,
    ReferenceSettings,
    StreamSettings,
    TrainerSettings,
    WeightTransferSettings,
)
from pipelinerl_common.settings.staleness import StalenessSettings
from pipelinerl_staleness.registry import make_policy

API_VERSION = "pipelinerl.dev/v1alpha1"
KIND = "PipelineRLJob"


class Metadata(Settings):
    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=40)]
    """Name of the job: lower-case letters, digits and '-', at most 40."""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    namespace: str | None = None


class JobSpec(Settings):
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of everything that is random."""
    model: ModelSettings
    task: TaskSettings
    algorithm: AlgorithmSettings = AlgorithmSettings()
    staleness: StalenessSettings = StalenessSettings()
    actors: ActorSettings = ActorSettings()
    reference: ReferenceSettings | None = None
    preprocessor: PreprocessorSettings = PreprocessorSettings()
    trainers: TrainerSettings = TrainerSettings()
    stream: StreamSettings = StreamSettings()
    weight_transfer: WeightTransferSettings = WeightTransferSettings()

    @model_validator(mode="after")
    def _sections_agree(self) -> "JobSpec":
        kl = self.algorithm.kl.coefficient
        if kl > 0 and self.reference is None:
            raise ValueError(
                f"algorithm.kl.coefficient={kl} needs a reference model, but spec.reference is not set: "
                "add 'reference: {}' or set the coefficient to 0"
            )
        if self.reference is not None and kl == 0:
            raise ValueError(
                "spec.reference is set but algorithm.kl.coefficient=0 never uses it: remove it or set the coefficient"
            )
        max_tokens, max_len = self.task.sampling.max_tokens, self.model.max_model_len
        if max_tokens >= max_len:
            raise ValueError(f"task.sampling.maxTokens={max_tokens} leaves no room for a prompt in model.maxModelLen={max_len}")
        budget = self.trainers.micro_batch_tokens
        if budget < max_len:
            raise ValueError(
                f"trainers.microBatchTokens={budget} cannot hold one trajectory of model.maxModelLen={max_len} tokens"
            )
        if self.algorithm.baseline == "leave_one_out" and self.task.group_size < 2:
            raise ValueError(f"algorithm.baseline=leave_one_out needs task.groupSize of at least 2, not {self.task.group_size}")
        return self

    @model_validator(mode="after")
    def _over_long_penalty_fits(self) -> "JobSpec":
        buffer, max_tokens = self.algorithm.overlong.penalty_buffer_tokens, self.task.sampling.max_tokens
        if buffer > max_tokens:
            raise ValueError(
                f"algorithm.overlong.penaltyBufferTokens={buffer} is more than task.sampling.maxTokens={max_tokens}: "
                "every completion would be punished"
            )
        return self

    @model_validator(mode="after")
    def _ring_buffer_holds_a_batch(self) -> "JobSpec":
        groups, batch = self.preprocessor.ring_buffer_groups, self.algorithm.groups_per_step
        needed = make_policy(self.staleness.parse(), batch).min_waiting()
        if groups is not None and groups < needed:
            raise ValueError(
                f"preprocessor.ringBufferGroups={groups} is too small: with staleness.policy={self.staleness.policy} and "
                f"algorithm.groupsPerStep={batch} a batch needs {needed} waiting groups"
            )
        return self


class Job(Settings):
    api_version: Literal["pipelinerl.dev/v1alpha1"]
    kind: Literal["PipelineRLJob"]
    metadata: Metadata
    spec: JobSpec

    @property
    def name(self) -> str:
        return self.metadata.name
