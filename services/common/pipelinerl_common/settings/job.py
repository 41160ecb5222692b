"""The job file: `PipelineRLJob`, the same for `pipelinerl up` and for `kubectl apply`."""

import re
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from pipelinerl_common.settings.algorithm import AlgorithmSettings
from pipelinerl_common.settings.base import CLUSTER_ONLY, Settings
from pipelinerl_common.settings.evaluation import EvaluationSettings
from pipelinerl_common.settings.kubernetes import (
    EnvironmentVariable,
    FailurePolicySettings,
    Image,
    NetworkSettings,
    Quantity,
    RestartSettings,
    SchedulingSettings,
    Seconds,
    SecretReference,
)
from pipelinerl_common.settings.model import ModelSettings, TaskSettings
from pipelinerl_common.settings.roles import (
    ActorSettings,
    AutoscaleSettings,
    PreprocessorSettings,
    ReferenceSettings,
    StreamSettings,
    TrainerSettings,
    WeightTransferSettings,
)
from pipelinerl_common.settings.telemetry import TelemetrySettings
from pipelinerl_common.text import did_you_mean
from pipelinerl_staleness.policy import PolicySettings
from pipelinerl_staleness.registry import POLICIES, make_policy, parse_policy_settings


class StalenessSettings(Settings):
    """The staleness policy by name, with the policy's own parameters beside it: `{policy: areal,
    eta: 2}`. Unknown parameters are refused.
    """

    model_config = ConfigDict(extra="allow")

    policy: str = "areal"
    """Name of the staleness policy."""

    @model_validator(mode="after")
    def _known(self) -> "StalenessSettings":
        self.parse()
        return self

    @property
    def parameters(self) -> dict[str, Any]:
        """The policy's own parameters, by their snake_case names. Raises ValueError for one that is
        given in both spellings.
        """
        names = (
            {to_camel(name): name for name in POLICIES[self.policy].parameter_names()}
            if self.policy in POLICIES
            else {}
        )
        extra = self.model_extra or {}
        for camel, name in names.items():
            if camel != name and {camel, name} <= extra.keys():
                raise ValueError(
                    f"{camel}={extra[camel]!r} and {name}={extra[name]!r} are one parameter: give "
                    "it once"
                )
        return {names.get(key, key): value for key, value in extra.items()}

    def parse(self) -> PolicySettings:
        """The policy's own frozen settings. Raises ValueError that names the parameter, spelt as
        here, and what is allowed.
        """
        parameters = self.parameters
        try:
            return parse_policy_settings(self.policy, parameters)
        except ValueError as error:
            if self.policy not in POLICIES:
                raise ValueError(f"{error}{did_you_mean(self.policy, POLICIES)}") from error
            names, message = POLICIES[self.policy].parameter_names(), str(error)
            for name in names:
                message = re.sub(rf"\b{name}\b", to_camel(name), message)
            unknown = sorted(parameters.keys() - set(names))[:1]
            hints = [did_you_mean(name, map(to_camel, names)) for name in unknown]
            raise ValueError("".join([message, *hints])) from error


API_VERSION = "pipelinerl.dev/v1alpha1"
KIND = "PipelineRLJob"


class Metadata(Settings):
    """Name and labels of the job, as of any Kubernetes object."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=40)]
    """Name of the job: at most 40 lower-case letters, digits and '-'."""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    namespace: str | None = None


class JobSpec(Settings):
    """Everything that is configured about a job."""

    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of all randomness in the run."""
    model: ModelSettings
    """The model that is trained."""
    task: TaskSettings
    """The task: prompts, and the verification of answers."""
    algorithm: AlgorithmSettings = AlgorithmSettings()
    """The objective, the optimizer and the batch."""
    staleness: StalenessSettings = StalenessSettings()
    """The staleness policy, which bounds how far generation runs ahead of training."""
    actors: ActorSettings = ActorSettings()
    """The actors: rollout loops with their own generators."""
    reference: ReferenceSettings | None = None
    """Generators with the frozen reference model, for the KL penalty. Unset: none."""
    preprocessor: PreprocessorSettings = PreprocessorSettings()
    """The preprocessor: ledger of groups, advantages, batch packing."""
    trainers: TrainerSettings = TrainerSettings()
    """The trainers, which run DeepSpeed."""
    evaluation: EvaluationSettings | None = None
    """Evaluation of checkpoints on their own sets of prompts while training continues. Unset: none.
    """
    stream: StreamSettings = StreamSettings()
    """The sample stream between actors and preprocessor (NATS JetStream)."""
    weight_transfer: WeightTransferSettings = WeightTransferSettings()
    """The transfer of new weights to the generators while they decode."""
    telemetry: TelemetrySettings = TelemetrySettings()
    """Destinations of metrics and traces beside Prometheus."""
    suspend: Annotated[bool, CLUSTER_ONLY] = False
    """Deletes the job's pods and keeps everything else; when turned off again, training resumes
    from the newest checkpoint.
    """
    managed_by: Annotated[Annotated[str, Field(max_length=253)], CLUSTER_ONLY] = ""
    """Another controller that manages this job, which the operator then ignores. Immutable."""
    image: Annotated[Image | None, CLUSTER_ONLY] = None
    """Container image of every role that has none of its own. Unset: the operator's own image."""
    image_pull_secrets: Annotated[list[SecretReference], Field(max_length=16), CLUSTER_ONLY] = []
    """Secrets with credentials of image registries, for every pod."""
    env: Annotated[list[EnvironmentVariable], Field(max_length=128), CLUSTER_ONLY] = []
    """Environment variables of every container."""
    scheduling: Annotated[SchedulingSettings, CLUSTER_ONLY] = SchedulingSettings()
    """Placement of the pods."""
    network: Annotated[NetworkSettings, CLUSTER_ONLY] = NetworkSettings()
    """Network devices of the pods."""
    shared_memory_size: Annotated[Quantity, CLUSTER_ONLY] = "16Gi"
    """Size of /dev/shm in pods that compute; used shared memory counts as memory of the pod. "0"
    keeps the container runtime's default.
    """
    failure_policy: Annotated[FailurePolicySettings, CLUSTER_ONLY] = FailurePolicySettings()
    """Restarts of pods after failures, and their limits."""
    active_deadline_seconds: Annotated[Seconds | None, CLUSTER_ONLY] = None
    """Longest time in seconds that the job may be active (not suspended); it fails beyond it."""
    pre_running_deadline_seconds: Annotated[Seconds | None, CLUSTER_ONLY] = None
    """Longest time in seconds until every role runs; the job fails beyond it."""
    ttl_seconds_after_finished: Annotated[Seconds | None, CLUSTER_ONLY] = None
    """Time in seconds after its end at which the job is deleted. Unset: it is kept."""
    clean_pod_policy: Annotated[Literal["Running", "All", "None"], CLUSTER_ONLY] = "Running"
    """Pods that are deleted when the job ends: those that still run (`Running`), `All` or `None`.
    """
    restart: Annotated[RestartSettings, CLUSTER_ONLY] = RestartSettings()
    """Restarts of the pods on request."""
    autoscale: AutoscaleSettings = AutoscaleSettings()
    """Adjustment of the number of generating actors while the job runs."""

    @property
    def most_actors(self) -> int:
        """Largest number of actors that the job may ever have: more than `actors.replicas` where it
        scales by itself.
        """
        most = self.actors.max_replicas if self.autoscale.enabled else None
        return self.actors.replicas if most is None else most

    @property
    def zero_stage(self) -> int:
        """Stage of ZeRO that the trainers use."""
        by_default = 3 if self.actors.gpus_per_replica else 1
        return by_default if self.trainers.zero_stage is None else self.trainers.zero_stage

    @property
    def checkpoints_activations(self) -> bool:
        """Whether the trainers compute activations again in the backward pass."""
        wanted = self.trainers.activation_checkpointing
        return bool(self.actors.gpus_per_replica) if wanted is None else wanted

    @model_validator(mode="after")
    def _sections_agree(self) -> "JobSpec":
        kl = self.algorithm.kl.coefficient
        if kl > 0 and self.reference is None:
            raise ValueError(
                f"algorithm.kl.coefficient={kl} needs a reference model, but spec.reference is not "
                "set: "
                "add 'reference: {}' or set the coefficient to 0"
            )
        if self.reference is not None and kl == 0:
            raise ValueError(
                "spec.reference is set but algorithm.kl.coefficient=0 never uses it: remove it or "
                "set the coefficient"
            )
        max_tokens, max_len = self.task.sampling.max_tokens, self.model.max_model_len
        if max_tokens >= max_len:
            raise ValueError(
                f"task.sampling.maxTokens={max_tokens} leaves no room for a prompt in "
                f"model.maxModelLen={max_len}"
            )
        budget = self.trainers.micro_batch_tokens
        if budget < max_len:
            raise ValueError(
                f"trainers.microBatchTokens={budget} cannot hold one trajectory of "
                f"model.maxModelLen={max_len} tokens"
            )
        baseline = self.algorithm.baseline
        if baseline in ("leave_one_out", "mean") and self.task.group_size < 2:
            raise ValueError(
                f"algorithm.baseline={baseline} needs task.groupSize of at least 2, not "
                f"{self.task.group_size}"
            )
        return self

    @model_validator(mode="after")
    def _evaluation_fits(self) -> "JobSpec":
        if self.evaluation is None:
            return self
        every, saved = self.evaluation.every_steps, self.trainers.checkpoint.every_steps
        if saved == 0 or every % saved:
            raise ValueError(
                f"evaluation.everySteps={every} must be a multiple of "
                f"trainers.checkpoint.everySteps={saved}, which must be "
                "above 0: checkpoints are what is evaluated"
            )
        max_len = self.model.max_model_len
        for each in self.evaluation.sets:
            if each.sampling is not None and each.sampling.max_tokens >= max_len:
                raise ValueError(
                    f"sampling.maxTokens={each.sampling.max_tokens} of the evaluation set "
                    f"{each.name!r} leaves no room for a "
                    f"prompt in model.maxModelLen={max_len}"
                )
        return self

    @model_validator(mode="after")
    def _scaling_has_bounds(self) -> "JobSpec":
        if self.autoscale.enabled and self.actors.max_replicas is None:
            raise ValueError(
                "autoscale.enabled=true needs actors.maxReplicas: set the most actors that it may "
                "ask for"
            )
        return self

    @model_validator(mode="after")
    def _over_long_penalty_fits(self) -> "JobSpec":
        buffer, max_tokens = (
            self.algorithm.overlong.penalty_buffer_tokens,
            self.task.sampling.max_tokens,
        )
        if buffer > max_tokens:
            raise ValueError(
                f"algorithm.overlong.penaltyBufferTokens={buffer} is more than "
                f"task.sampling.maxTokens={max_tokens}: "
                "every completion would be punished"
            )
        return self

    @model_validator(mode="after")
    def _ring_buffer_holds_a_batch(self) -> "JobSpec":
        groups, batch = self.preprocessor.ring_buffer_groups, self.algorithm.groups_per_step
        needed = make_policy(self.staleness.parse(), batch).min_waiting()
        if groups is not None and groups < needed:
            raise ValueError(
                f"preprocessor.ringBufferGroups={groups} is too small: with "
                f"staleness.policy={self.staleness.policy} and "
                f"algorithm.groupsPerStep={batch} a batch needs {needed} waiting groups"
            )
        return self


class Job(Settings):
    """A job file as a whole."""

    api_version: Literal["pipelinerl.dev/v1alpha1"]
    kind: Literal["PipelineRLJob"]
    metadata: Metadata
    spec: JobSpec

    @property
    def name(self) -> str:
        return self.metadata.name
