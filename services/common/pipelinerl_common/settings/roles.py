"""`spec.actors`, `reference`, `preprocessor`, `trainers`, `stream`, `weightTransfer`: the processes and how they are sized."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from pipelinerl_common.settings.base import Settings

MEBIBYTE = 1 << 20


class GeneratorSettings(Settings):
    engine: Literal["vllm", "transformers"] = "vllm"
    """What decodes: vLLM, or Hugging Face transformers (slow; for numerics)."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Workers of one generator that share the weights."""
    max_running_requests: Annotated[int, Field(ge=1)] = 64
    """Most sequences decoded at once by one generator (H)."""
    kv_cache_bytes: Annotated[int, Field(ge=MEBIBYTE)] | None = None
    """Bytes of KV cache per worker; unset lets the engine size it from the device's memory."""
    prefix_caching: bool = False
    """Reuse KV of shared prompt prefixes, within one policy version only."""
    engine_args: dict[str, JsonValue] = {}
    """Further arguments of the engine, by its own names."""


class ActorSettings(Settings):
    replicas: Annotated[int, Field(ge=1)] = 1
    """Actors: each is a rollout loop with generators of its own."""
    generators_per_replica: Annotated[int, Field(ge=1, le=64)] = 1
    """Generators of one actor; requests go to the least loaded."""
    gpus_per_replica: Annotated[int, Field(ge=0)] = 0
    """GPUs of one actor; 0 runs on the CPU."""
    generator: GeneratorSettings = GeneratorSettings()
    startup_timeout_seconds: Annotated[float, Field(gt=0)] = 3600.0
    """Longest time to load the model."""
    drain_seconds: Annotated[float, Field(ge=0)] = 30.0
    """Time to finish or hand back what runs when an actor is asked to stop."""


class ReferenceSettings(Settings):
    replicas: Annotated[int, Field(ge=1)] = 1
    """Generators that serve the frozen reference model."""
    generator: GeneratorSettings = GeneratorSettings()


class PreprocessorSettings(Settings):
    ring_buffer_groups: Annotated[int, Field(ge=1)] | None = None
    """Most finished groups that wait for training; the oldest are dropped and counted beyond it. Unset: no more than the
    staleness policy can have outstanding, so that nothing is dropped."""
    lease_seconds: Annotated[float, Field(gt=1)] = 60.0
    """A group whose actor was not heard of for this long is granted again."""
    max_group_attempts: Annotated[int, Field(ge=1)] = 3
    """How often a group is granted before it is given up."""


class CheckpointSettings(Settings):
    every_steps: Annotated[int, Field(ge=0)] = 100
    """Optimizer steps between checkpoints; 0 saves only at the end and on a stop."""
    keep: Annotated[int, Field(ge=1)] = 2
    """Newest checkpoints that are kept."""


class ParitySettings(Settings):
    num_prompts: Annotated[int, Field(ge=0)] = 4
    """Completions compared between generator and trainer before the first step; 0 turns the check off."""
    max_logprob_difference: Annotated[float, Field(gt=0)] = 0.1
    """Largest mean absolute difference of log-probabilities per token; training is refused beyond it."""


class TrainerSettings(Settings):
    replicas: Annotated[int, Field(ge=1)] = 1
    """Trainer nodes."""
    processes_per_node: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks per node, one per GPU."""
    zero_stage: Literal[1, 2, 3] = 1
    """DeepSpeed ZeRO stage."""
    micro_batch_tokens: Annotated[int, Field(ge=8)] = 4096
    """Token slots of a packed micro-batch."""
    activation_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping its activations: a third more time, far less memory."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    parity: ParitySettings = ParitySettings()


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
    """`staged` receives beside the running decode and pauses only to copy; `inplace` pauses for the whole transfer and
    needs no second copy on the device."""
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
