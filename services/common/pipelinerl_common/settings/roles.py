"""`spec.actors`, `reference`, `preprocessor`, `trainers`, `stream`, `weightTransfer`: the processes
and how they are sized.

`spec.autoscale`: how many actors there are while the job runs.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from pipelinerl_common.settings.base import CLUSTER_ONLY, Settings
from pipelinerl_common.settings.kubernetes import Image, ObjectName, PodTemplate

MEBIBYTE = 1 << 20


class GeneratorSettings(Settings):
    engine: Literal["vllm", "transformers"] = "vllm"
    """What decodes: vLLM, or Hugging Face transformers (slow; for numerics)."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Workers of one generator that share the weights."""
    max_running_requests: Annotated[int, Field(ge=1, le=1000000)] = 64
    """Most sequences decoded at once by one generator (H)."""
    kv_cache_bytes: Annotated[int, Field(ge=MEBIBYTE)] | None = None
    """Bytes of KV cache per worker; unset lets the engine size it from the device's memory."""
    prefix_caching: bool = False
    """Reuse KV of shared prompt prefixes, within one policy version only."""
    engine_args: dict[str, JsonValue] = {}
    """Further arguments of the engine, by its own names."""


class ActorSettings(Settings):
    replicas: Annotated[int, Field(ge=1, le=8192)] = 1
    """Actors: each is a rollout loop with generators of its own."""
    min_replicas: Annotated[int, Field(ge=1, le=8192)] = 1
    """Fewest actors, which Kubernetes schedules together with the trainers; those beyond come and
    go while training runs.
    """
    max_replicas: Annotated[int, Field(ge=1, le=8192)] | None = None
    """Most actors that scaling may ask for."""
    generators_per_replica: Annotated[int, Field(ge=1, le=64)] = 1
    """Generators of one actor; requests go to the least loaded."""
    gpus_per_replica: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs of one actor; 0 runs on the CPU."""
    generator: GeneratorSettings = GeneratorSettings()
    """The engine of each generator."""
    startup_timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 3600.0
    """Longest time to load the model."""
    drain_seconds: Annotated[float, Field(ge=0, le=86400)] = 30.0
    """Time to finish or hand back what runs when an actor is asked to stop."""
    image: Annotated[Image | None, CLUSTER_ONLY] = None
    """Image of this role; unset takes spec.image, and without that the operator's."""
    pod_template: Annotated[PodTemplate | None, CLUSTER_ONLY] = None
    """metadata and spec of a pod, laid over the operator's own by name: resources, tolerations,
    volumes, sidecars. Containers: rollout, generator-0, generator-1, ...
    """

    @model_validator(mode="after")
    def _replicas_in_range(self) -> Self:
        if self.min_replicas > self.replicas:
            raise ValueError(
                f"actors.minReplicas={self.min_replicas} is more than "
                f"actors.replicas={self.replicas}: lower the one or "
                "raise the other"
            )
        if self.max_replicas is not None and self.replicas > self.max_replicas:
            raise ValueError(
                f"actors.replicas={self.replicas} is more than "
                f"actors.maxReplicas={self.max_replicas}: lower the one or "
                "raise the other"
            )
        return self


class ReferenceSettings(Settings):
    replicas: Annotated[int, Field(ge=1, le=8192)] = 1
    """Generators that serve the frozen reference model."""
    gpus_per_replica: Annotated[int, Field(ge=0, le=64)] | None = None
    """GPUs of one; unset gives it tensorParallelSize where actors have GPUs, and none where they
    have none.
    """
    generator: GeneratorSettings = GeneratorSettings()
    """The engine of each generator."""
    startup_timeout_seconds: Annotated[float, Field(gt=0, le=86400), CLUSTER_ONLY] = 3600.0
    """Longest time to load the model."""
    image: Annotated[Image | None, CLUSTER_ONLY] = None
    """Image of this role; unset takes spec.image, and without that the operator's."""
    pod_template: Annotated[PodTemplate | None, CLUSTER_ONLY] = None
    """metadata and spec of a pod, laid over the operator's own by name: resources, tolerations,
    volumes, sidecars. Container: generator.
    """


class PreprocessorSettings(Settings):
    ring_buffer_groups: Annotated[int, Field(ge=1)] | None = None
    """Most finished groups that wait for training; the oldest are dropped and counted beyond it.
    Unset: no more than the staleness policy can have outstanding, so that nothing is dropped.
    """
    lease_seconds: Annotated[float, Field(gt=1)] = 60.0
    """A group whose actor was not heard of for this long is granted again."""
    max_group_attempts: Annotated[int, Field(ge=1)] = 3
    """How often a group is granted before it is given up."""
    image: Annotated[Image | None, CLUSTER_ONLY] = None
    """Image of this role; unset takes spec.image, and without that the operator's."""
    pod_template: Annotated[PodTemplate | None, CLUSTER_ONLY] = None
    """metadata and spec of a pod, laid over the operator's own by name: resources, tolerations,
    volumes, sidecars. Container: preprocessor.
    """


class CheckpointSettings(Settings):
    every_steps: Annotated[int, Field(ge=0)] = 100
    """Optimizer steps between checkpoints; 0 saves only at the end and on a stop."""
    keep: Annotated[int, Field(ge=1)] = 2
    """Newest checkpoints that are kept."""
    pvc: Annotated[ObjectName | None, CLUSTER_ONLY] = None
    """PersistentVolumeClaim for checkpoints and the final model, in a folder of the job's name; a
    job of the same name goes on from there. Several trainer nodes need one that many nodes can
    mount. Without it, or uri, restarted trainers begin anew.
    """
    uri: Annotated[
        Annotated[str, Field(min_length=9, max_length=1024, pattern=r"^file:///[^\s]+$")] | None,
        CLUSTER_ONLY,
    ] = None
    """file:///FOLDER instead of a claim: a folder that trainers.podTemplate mounts, for example a
    bucket by its CSI driver.
    """

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.pvc is not None and self.uri is not None:
            raise ValueError("trainers.checkpoint has both pvc and uri: leave one of them out")
        return self


class ParitySettings(Settings):
    num_prompts: Annotated[int, Field(ge=0)] = 4
    """Completions compared between generator and trainer before the first step; 0 turns the check
    off.
    """
    max_logprob_difference: Annotated[float, Field(gt=0)] = 0.1
    """Largest mean absolute difference of log-probabilities per token; training is refused beyond
    it.
    """


class TrainerSettings(Settings):
    replicas: Annotated[int, Field(ge=1, le=8192)] = 1
    """Trainer nodes."""
    processes_per_node: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks per node, one per GPU."""
    zero_stage: Literal[1, 2, 3] = 1
    """DeepSpeed ZeRO stage."""
    sequence_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks of a node that share each micro-batch (Ulysses); it must divide processesPerNode and
    the attention heads.
    """
    micro_batch_tokens: Annotated[int, Field(ge=8)] = 4096
    """Token slots of a packed micro-batch."""
    activation_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping its activations: a third
    more time, far less memory.
    """
    checkpoint: CheckpointSettings = CheckpointSettings()
    """What outlives a trainer."""
    parity: ParitySettings = ParitySettings()
    """The check before the first step that generators and trainer compute the same."""
    drain_seconds: Annotated[float, Field(ge=0, le=86400)] = 120.0
    """Time to finish the step and save a checkpoint when the trainers are asked to stop."""
    image: Annotated[Image | None, CLUSTER_ONLY] = None
    """Image of this role; unset takes spec.image, and without that the operator's."""
    pod_template: Annotated[PodTemplate | None, CLUSTER_ONLY] = None
    """metadata and spec of a pod, laid over the operator's own by name: resources, tolerations,
    volumes, sidecars. Container: trainer.
    """

    @model_validator(mode="after")
    def _rows_stay_in_a_node(self) -> Self:
        processes, size = self.processes_per_node, self.sequence_parallel_size
        if processes % size:
            raise ValueError(
                f"trainers.processesPerNode={processes} is no multiple of "
                f"trainers.sequenceParallelSize={size}: ranks that "
                "share a micro-batch are on one node; change the one or the other"
            )
        return self


class StreamSettings(Settings):
    replicas: Literal[1, 3, 5] = 1
    """Copies that JetStream keeps of the sample stream."""
    max_bytes: Annotated[int, Field(ge=MEBIBYTE)] = 1024 * MEBIBYTE
    """Most bytes that wait on the sample stream; publishing waits beyond it."""
    max_age_seconds: Annotated[float, Field(gt=0)] = 86400.0
    """Samples older than this are removed."""


class WeightTransferSettings(Settings):
    backend: Literal["nccl", "gloo"] = "nccl"
    """Collective library of the weight broadcast: nccl between GPUs, gloo on CPUs."""
    mode: Literal["staged", "inplace"] = "staged"
    """`staged` receives beside the running decode and pauses only to copy; `inplace` pauses for the
    whole transfer and needs no second copy on the device.
    """
    kv_cache: Literal["keep", "recompute"] = "keep"
    """What happens to the KV cache of running sequences at an update."""
    bucket_bytes: Annotated[int, Field(ge=1024)] = 64 * MEBIBYTE
    """Tensors are packed into buckets of this size for the broadcast."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the group's rendezvous on trainer rank 0; 0 takes a free one."""
    form_timeout_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Longest time to form a group."""
    sync_timeout_seconds: Annotated[float, Field(gt=0)] = 120.0
    """Longest time for one update; a generator that takes longer is expelled."""


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
