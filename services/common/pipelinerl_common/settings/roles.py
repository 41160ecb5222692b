"""`spec.actors`, `reference`, `preprocessor`, `trainers`, `stream`, `weightTransfer`, `autoscale`:
the processes of a job and their sizes.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from pipelinerl_common.settings.base import CLUSTER_ONLY, Settings
from pipelinerl_common.settings.kubernetes import Image, ObjectName, PodTemplate

MEBIBYTE = 1 << 20


class GeneratorSettings(Settings):
    engine: Literal["vllm", "transformers"] = "vllm"
    """Inference engine: `vllm`, or Hugging Face `transformers` (slow; for checking numerics)."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of workers of one generator that share the weights."""
    max_running_requests: Annotated[int, Field(ge=1, le=1000000)] = 64
    """Most sequences that one generator decodes at a time (H)."""
    kv_cache_bytes: Annotated[int, Field(ge=MEBIBYTE)] | None = None
    """Size of the KV cache per worker in bytes. Unset: the engine derives it from the device's
    memory.
    """
    prefix_caching: bool = False
    """Reuses the KV cache of shared prompt prefixes, within one policy version only."""
    engine_args: dict[str, JsonValue] = {}
    """Further arguments of the engine, under the engine's own names."""


class ActorSettings(Settings):
    replicas: Annotated[int, Field(ge=1, le=8192)] = 1
    """Number of actors; each is a rollout loop with its own generators."""
    min_replicas: Annotated[int, Field(ge=1, le=8192)] = 1
    """Smallest number of actors, scheduled together with the trainers. Actors beyond it join and
    leave while training runs.
    """
    max_replicas: Annotated[int, Field(ge=1, le=8192)] | None = None
    """Largest number of actors that scaling may ask for; `autoscale` needs it."""
    generators_per_replica: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of generators of one actor; requests go to the least loaded one."""
    gpus_per_replica: Annotated[int, Field(ge=0, le=64)] = 0
    """Number of GPUs of one actor: `generatorsPerReplica` times `generator.tensorParallelSize`; 0
    runs on the CPU.
    """
    generator: GeneratorSettings = GeneratorSettings()
    """Engine of each generator."""
    startup_timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 3600.0
    """Longest time in seconds until a generator has loaded the model."""
    drain_seconds: Annotated[float, Field(ge=0, le=86400)] = 30.0
    """Time in seconds to finish or hand back running groups when an actor is asked to stop."""
    image: Annotated[Image | None, CLUSTER_ONLY] = None
    """Image of this role. Unset: `spec.image`, else the operator's own."""
    pod_template: Annotated[PodTemplate | None, CLUSTER_ONLY] = None
    """Pod metadata and spec, merged by name over the operator's: resources, tolerations, volumes,
    sidecars. Containers: rollout, generator-0, generator-1, ....
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

    @model_validator(mode="after")
    def _every_worker_has_one_gpu(self) -> Self:
        generators, workers = self.generators_per_replica, self.generator.tensor_parallel_size
        if self.gpus_per_replica not in (0, generators * workers):
            raise ValueError(
                f"actors.gpusPerReplica={self.gpus_per_replica} must be 0 (CPU) or "
                f"{generators * workers}: actors.generatorsPerReplica={generators} times "
                f"actors.generator.tensorParallelSize={workers}, one GPU for each worker"
            )
        return self


class ReferenceSettings(Settings):
    replicas: Annotated[int, Field(ge=1, le=8192)] = 1
    """Number of generators that serve the frozen reference model."""
    gpus_per_replica: Annotated[int, Field(ge=0, le=64)] | None = None
    """Number of GPUs of one generator. Unset: `tensorParallelSize` where actors have GPUs,
    otherwise none.
    """
    generator: GeneratorSettings = GeneratorSettings()
    """Engine of each generator."""
    startup_timeout_seconds: Annotated[float, Field(gt=0, le=86400), CLUSTER_ONLY] = 3600.0
    """Longest time in seconds until a generator has loaded the model."""
    image: Annotated[Image | None, CLUSTER_ONLY] = None
    """Image of this role. Unset: `spec.image`, else the operator's own."""
    pod_template: Annotated[PodTemplate | None, CLUSTER_ONLY] = None
    """Pod metadata and spec, merged by name over the operator's: resources, tolerations, volumes,
    sidecars. Containers: generator.
    """


class PreprocessorSettings(Settings):
    ring_buffer_groups: Annotated[int, Field(ge=1)] | None = None
    """Largest number of finished groups that wait for training; beyond it the oldest are dropped.
    Unset: as many as the staleness policy can have outstanding.
    """
    lease_seconds: Annotated[float, Field(gt=1)] = 60.0
    """Time in seconds without a report of its actor after which a group is leased again."""
    max_group_attempts: Annotated[int, Field(ge=1)] = 3
    """Number of leases of a group after which it is given up."""
    image: Annotated[Image | None, CLUSTER_ONLY] = None
    """Image of this role. Unset: `spec.image`, else the operator's own."""
    pod_template: Annotated[PodTemplate | None, CLUSTER_ONLY] = None
    """Pod metadata and spec, merged by name over the operator's: resources, tolerations, volumes,
    sidecars. Containers: preprocessor.
    """


class CheckpointSettings(Settings):
    every_steps: Annotated[int, Field(ge=0)] = 100
    """Optimizer steps between checkpoints; 0 saves one only at the end and on a stop."""
    keep: Annotated[int, Field(ge=1)] = 2
    """Number of newest checkpoints that are kept."""
    pvc: Annotated[ObjectName | None, CLUSTER_ONLY] = None
    """PersistentVolumeClaim for checkpoints and the final model; a job of the same name resumes
    from there. Several trainer nodes need one that many nodes can mount. Without `pvc` or `uri`,
    restarted trainers start from the initial weights.
    """
    uri: Annotated[
        Annotated[str, Field(min_length=9, max_length=1024, pattern=r"^file:///[^\s]+$")] | None,
        CLUSTER_ONLY,
    ] = None
    """Folder `file:///FOLDER` instead of a claim, mounted by `trainers.podTemplate`, for example a
    bucket through its CSI driver.
    """

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.pvc is not None and self.uri is not None:
            raise ValueError("trainers.checkpoint has both pvc and uri: leave one of them out")
        return self


class ParitySettings(Settings):
    num_prompts: Annotated[int, Field(ge=0)] = 4
    """Number of completions on which generator and trainer are compared before the first step; 0
    disables the check.
    """
    max_logprob_difference: Annotated[float, Field(gt=0)] = 0.1
    """Largest mean absolute difference of log-probabilities per token; training is refused beyond
    it.
    """


class TrainerSettings(Settings):
    replicas: Annotated[int, Field(ge=1, le=8192)] = 1
    """Number of trainer nodes."""
    processes_per_node: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of ranks per node, one per GPU."""
    zero_stage: Literal[1, 2, 3] | None = None
    """Stage of DeepSpeed ZeRO: what is divided among the ranks. 1 divides the optimizer's state, 2
    the gradients too, 3 the weights too. Unset: 3 where actors have GPUs, otherwise 1.
    """
    sequence_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of ranks of a node that share each micro-batch (Ulysses); a divisor of
    `processesPerNode` and of the attention heads.
    """
    micro_batch_tokens: Annotated[int, Field(ge=8)] = 4096
    """Number of token slots of a packed micro-batch."""
    activation_checkpointing: bool | None = None
    """Computes each layer again in the backward pass instead of storing its activations: a third
    more time, far less memory. Unset: true where actors have GPUs, otherwise false.
    """
    checkpoint: CheckpointSettings = CheckpointSettings()
    """Checkpoints."""
    parity: ParitySettings = ParitySettings()
    """Check before the first step that generators and trainer compute the same log-probabilities.
    """
    startup_timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 3600.0
    """Longest time in seconds that ranks wait for the last of them to join, which may still wait
    for a node, an image or a model.
    """
    collective_timeout_seconds: Annotated[float, Field(ge=10, le=86400)] = 600.0
    """Longest time in seconds of one collective of training. A rank that hangs without an error
    ends the others then.
    """
    drain_seconds: Annotated[float, Field(ge=0, le=86400)] = 120.0
    """Time in seconds to finish the step and save a checkpoint when the trainers are asked to stop.
    """
    image: Annotated[Image | None, CLUSTER_ONLY] = None
    """Image of this role. Unset: `spec.image`, else the operator's own."""
    pod_template: Annotated[PodTemplate | None, CLUSTER_ONLY] = None
    """Pod metadata and spec, merged by name over the operator's: resources, tolerations, volumes,
    sidecars. Containers: trainer.
    """

    @model_validator(mode="after")
    def _rows_stay_in_a_node(self) -> Self:
        processes, size = self.processes_per_node, self.sequence_parallel_size
        if processes % size:
            raise ValueError(
                f"trainers.processesPerNode={processes} must be a multiple of "
                f"trainers.sequenceParallelSize={size}: ranks that share a micro-batch are on one "
                "node; change the one or the other"
            )
        return self


class StreamSettings(Settings):
    replicas: Literal[1, 3, 5] = 1
    """Number of copies that JetStream keeps of the sample stream."""
    max_bytes: Annotated[int, Field(ge=MEBIBYTE)] = 1024 * MEBIBYTE
    """Largest size of the sample stream in bytes; publishing waits beyond it."""
    max_age_seconds: Annotated[float, Field(gt=0)] = 86400.0
    """Age in seconds at which samples are removed."""


class WeightTransferSettings(Settings):
    backend: Literal["nccl", "gloo"] = "nccl"
    """Library that transfers the weights: `nccl` between GPUs, `gloo` on CPUs."""
    mode: Literal["staged", "inplace"] = "staged"
    """`staged` receives while decoding continues and pauses only to copy the weights; `inplace`
    pauses for the whole transfer and needs no second copy on the device.
    """
    kv_cache: Literal["keep", "recompute"] = "keep"
    """KV cache of running sequences at an update: kept, or computed again with the new weights."""
    bucket_bytes: Annotated[int, Field(ge=1024)] = 64 * MEBIBYTE
    """Largest size in bytes of the buffers in which weights are sent."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the transfer group's rendezvous on trainer rank 0; 0 takes a free one."""
    form_timeout_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Longest time to form a transfer group, in seconds."""
    sync_timeout_seconds: Annotated[float, Field(gt=0)] = 120.0
    """Longest time for one update in seconds; a slower generator is expelled from the group."""


class AutoscaleSettings(Settings):
    enabled: bool = False
    """Adjusts the number of actors between `minReplicas` and `maxReplicas` by the ratio of the
    system's throughput to that of generation alone.
    """
    schedule: Literal["rule", "hybrid"] = "rule"
    """`rule` starts with `actors.replicas`; `hybrid` starts with `maxReplicas` and falls to
    `splitShare` after `exploreSteps`. From there both follow the ratio.
    """
    explore_steps: Annotated[int, Field(ge=1, le=1000000)] = 50
    """Optimizer steps of a hybrid schedule during which `maxReplicas` actors generate."""
    split_share: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Share of the GPUs (on a CPU: of actors and trainer ranks), those of `maxReplicas` actors and
    the trainers, that generates after `exploreSteps` of a hybrid schedule.
    """
    period_steps: Annotated[int, Field(ge=1, le=100000)] = 10
    """Optimizer steps between two decisions, counted from when every actor is ready."""
    low_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """Ratio below which the trainers are the bottleneck, and actors are removed."""
    high_ratio: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Ratio above which the generators are the bottleneck, and actors are added."""
    take_away_gpus: Annotated[int, Field(ge=1, le=1024)] = 5
    """Largest number of GPUs (actors on a CPU) that stop generating at one decision, rounded up to
    whole actors.
    """
    add_gpus: Annotated[int, Field(ge=1, le=1024)] = 2
    """Largest number of GPUs (actors on a CPU) that start generating at one decision, rounded up to
    whole actors.
    """

    @model_validator(mode="after")
    def _ratios_rise(self) -> Self:
        if self.low_ratio >= self.high_ratio:
            raise ValueError(
                f"autoscale.lowRatio={self.low_ratio} must be below "
                f"autoscale.highRatio={self.high_ratio}"
            )
        return self
