"""The memory model: bytes per GPU of trainer and generator, from a job's settings and its model's
config.json.

What is exact and what is not: the numbers of parameters are exact for the dense and
mixture-of-experts decoders that `ModelShape` reads; optimizer, gradients and weights are those that
DeepSpeed 0.19 holds; activations are the bytes that PyTorch keeps for the backward pass, measured
on meta tensors with a flash kernel and fitted per layer and token. What drivers, libraries and
allocators need is one round number each.

Activations of one layer for one token, elements of two bytes (h hidden size, H heads times head
size, K key-value heads times head size, I intermediate size, k experts of a token):

    16 h + 6 H + 4 K + 4 heads          attention and norms
    16 h + 12 H + 10 K + 8 heads        the same with norms of query and key (Qwen3)
    + 8 I                               a dense feed-forward layer
    + k (8 I + 4 h + 34) + 4 experts    a mixture of experts
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import GeneratorSettings, JobSpec

GIGABYTE = 1_000_000_000
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_CONTEXT_BYTES = 3 * GIGABYTE
"""CUDA context, NCCL's buffers, fragmentation: of each process."""
_ENGINE_BYTES = 3 * GIGABYTE
"""vLLM beside weights and KV cache: activations of one step, captured graphs."""
_ENGINE_SHARE = 0.92
"""Share of a GPU that vLLM uses when nothing else is set (gpu_memory_utilization)."""
_LIVE_ITEMS = 1_000_000_000
"""Parameters that ZeRO 3 keeps gathered (stage3_max_live_parameters)."""
_REDUCE_ITEMS = 500_000_000
"""Gradients that DeepSpeed reduces at a time (reduce_bucket_size)."""
_LOGITS_BYTES = 256 << 20
"""Logits of one chunk of tokens in float32; there are about four such tensors at a time."""
_UNSUPPORTED = ("kv_lora_rank", "ssm_cfg", "mamba_d_state", "linear_num_key_heads")
"""Keys of architectures whose attention or state the formulas do not describe."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder that decide about memory."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    """Width of a dense feed-forward layer; 0 where all layers are mixtures."""
    vocabulary: int
    is_tied: bool
    """Whether the output layer is the embeddings."""
    has_attention_bias: bool
    has_query_norm: bool
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """Reads config.json. Raises SettingsError for what the model does not describe."""
        config = {**config, **(config.get("text_config") or {})}
        kind = str(config.get("model_type", ""))
        unknown = [key for key in _UNSUPPORTED if config.get(key)]
        if unknown:
            raise SettingsError(f"model_type={kind}: {unknown[0]} is not in the memory model")
        try:
            hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
            experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
            width = int(config["intermediate_size"])
            return cls(
                hidden=hidden,
                layers=int(config["num_hidden_layers"]),
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_size=int(config.get("head_dim") or hidden // heads),
                intermediate=0 if experts else width,
                vocabulary=int(config["vocab_size"]),
                is_tied=bool(config.get("tie_word_embeddings", False)),
                has_attention_bias=bool(config.get("attention_bias", kind.startswith("qwen2"))),
                has_query_norm=kind.startswith("qwen3"),
                experts=experts,
                experts_per_token=int(config["num_experts_per_tok"]) if experts else 0,
                expert_width=int(config.get("moe_intermediate_size") or width) if experts else 0,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise SettingsError(f"config.json: no memory model without {error}") from error

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        attention = self.hidden * (2 * queries + 2 * keys)
        if self.has_attention_bias:
            attention += queries + 2 * keys
        norms = 2 * self.hidden + (2 * self.head_size if self.has_query_norm else 0)
        dense = 3 * self.hidden * self.intermediate
        mixture = self.experts * (3 * self.hidden * self.expert_width + self.hidden)
        return attention + norms + dense + mixture

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        embeddings = self.vocabulary * self.hidden * (1 if self.is_tied else 2)
        return embeddings + self.layers * self.layer_parameters + self.hidden

    @property
    def layer_activation_bytes(self) -> int:
        """Bytes that one layer keeps for one token until its backward pass, at two bytes an
        element.
        """
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        norms = (12, 10, 8) if self.has_query_norm else (6, 4, 4)
        attention = 16 * self.hidden + norms[0] * queries + norms[1] * keys + norms[2] * self.heads
        expert = 8 * self.expert_width + 4 * self.hidden + 34
        mixture = self.experts_per_token * expert + 4 * self.experts
        return attention + 8 * self.intermediate + mixture

    @property
    def kv_items(self) -> int:
        """Elements of the KV cache for one token."""
        return 2 * self.layers * self.kv_heads * self.head_size


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of one GPU, by what they are for."""

    process: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def trainer_memory(spec: JobSpec, shape: ModelShape) -> MemoryUse:
    """Returns the bytes of trainer rank 0's GPU, which has more than the others."""
    item = _ITEM_BYTES[spec.model.dtype]
    ranks = spec.trainers.replicas * spec.trainers.processes_per_node
    held, trained = shape.parameters, shape.parameters
    if spec.model.adapter is not None:
        trained = _adapter_parameters(spec, shape)
    weights, gradients, gathered = held * item, trained * 4 // ranks, 0
    if spec.zero_stage == 1:
        # DeepSpeed's optimizer for bfloat16 accumulates all gradients in float32 on every rank,
        # beside those of the backward pass.
        gradients = trained * (4 if item == 4 else item + 4)
    if spec.zero_stage == 3:
        weights = held * item // ranks
        gathered = min(held, _LIVE_ITEMS) * item
    slots = math.ceil(spec.trainers.micro_batch_tokens / spec.trainers.sequence_parallel_size)
    layer = shape.layer_activation_bytes * item // 2
    kept = shape.hidden * item * shape.layers + layer
    activations = slots * (kept if spec.checkpoints_activations else layer * shape.layers)
    return MemoryUse(
        "trainer rank 0",
        {
            "weights": weights,
            "gradients": gradients,
            "optimizer (float32 weights, two moments)": trained * 12 // ranks,
            "gathered weights": gathered,
            "gradients being reduced": min(trained, _REDUCE_ITEMS) * item,
            "activations": activations,
            "logits": 4 * _LOGITS_BYTES,
            "buffers of weights that are sent": 3 * spec.weight_transfer.bucket_bytes,
            "context and libraries": _CONTEXT_BYTES,
        },
    )


def generator_memory(
    spec: JobSpec, shape: ModelShape, settings: GeneratorSettings | None = None
) -> MemoryUse:
    """Returns the bytes of one worker's GPU, with the KV cache of a single sequence of
    `model.maxModelLen`: the least with which it can start.
    """
    settings = spec.actors.generator if settings is None else settings
    item, workers = _ITEM_BYTES[spec.model.dtype], settings.tensor_parallel_size
    weights = shape.parameters * item // workers
    takes_a_copy = spec.weight_transfer.mode == "staged"
    return MemoryUse(
        "generator worker",
        {
            "weights": weights,
            "second copy (weightTransfer.mode=staged)": weights if takes_a_copy else 0,
            "buffers of weights that arrive": _arriving_bytes(spec, shape),
            "KV cache of one sequence": sequence_kv_bytes(spec, shape, workers),
            "engine": _ENGINE_BYTES,
        },
    )


def _arriving_bytes(spec: JobSpec, shape: ModelShape) -> int:
    """Bytes of the chunks that a worker receives or passes on, and of the tensor that is put
    together from them: the embeddings are the largest.
    """
    embeddings = shape.vocabulary * shape.hidden * _ITEM_BYTES[spec.model.dtype]
    return 7 * spec.weight_transfer.bucket_bytes + embeddings


def sequence_kv_bytes(spec: JobSpec, shape: ModelShape, workers: int) -> int:
    """Bytes of the KV cache of one sequence of `model.maxModelLen` on one worker. Heads are not
    divided further than one to a worker.
    """
    share = max(1, min(workers, shape.kv_heads))
    return spec.model.max_model_len * shape.kv_items * _ITEM_BYTES[spec.model.dtype] // share


def full_sequences(spec: JobSpec, shape: ModelShape, gpu_bytes: int) -> int:
    """Returns how many sequences of `model.maxModelLen` one generator's KV cache holds."""
    use = generator_memory(spec, shape)
    workers = spec.actors.generator.tensor_parallel_size
    one = sequence_kv_bytes(spec, shape, workers)
    free = _ENGINE_SHARE * gpu_bytes - (use.total - one)
    return max(0, int(free // one))


def memory_faults(spec: JobSpec, shape: ModelShape, gpu_bytes: int) -> list[str]:
    """Returns what does not fit into a GPU of `gpu_bytes`, each with the number of bytes and the
    settings that help.
    """
    faults = []
    trainer = trainer_memory(spec, shape)
    if trainer.total > gpu_bytes:
        faults.append(
            f"trainer rank 0 needs {trainer.total / GIGABYTE:.1f} GB and the GPU has "
            f"{gpu_bytes / GIGABYTE:.1f} GB: {_largest(trainer)}; {_trainer_remedy(spec, trainer)}"
        )
    generator = generator_memory(spec, shape)
    if generator.total > _ENGINE_SHARE * gpu_bytes:
        copy = "weightTransfer.mode=inplace, " if spec.weight_transfer.mode == "staged" else ""
        faults.append(
            f"a generator's worker needs {generator.total / GIGABYTE:.1f} GB and vLLM has "
            f"{_ENGINE_SHARE * gpu_bytes / GIGABYTE:.1f} GB of the GPU: {_largest(generator)}; set "
            f"{copy}a larger actors.generator.tensorParallelSize or a smaller model.maxModelLen"
        )
    return faults


def _adapter_parameters(spec: JobSpec, shape: ModelShape) -> int:
    """Parameters of adapters of all of the decoder's linear layers; fewer where the job names
    some.
    """
    assert spec.model.adapter is not None
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    width = shape.intermediate or shape.experts * shape.expert_width
    sizes = 2 * (shape.hidden + queries) + 2 * (shape.hidden + keys) + 3 * (shape.hidden + width)
    return spec.model.adapter.rank * shape.layers * sizes


def _largest(use: MemoryUse) -> str:
    parts = sorted(use.parts.items(), key=lambda part: -part[1])[:3]
    return ", ".join(f"{name} {size / GIGABYTE:.1f}" for name, size in parts)


def _trainer_remedy(spec: JobSpec, use: MemoryUse) -> str:
    """Names the setting that frees most."""
    if spec.zero_stage < 3:
        return "set trainers.zeroStage=3"
    if not spec.checkpoints_activations:
        return "set trainers.activationCheckpointing=true"
    if use.parts["activations"] > use.total / 4:
        return "lower trainers.microBatchTokens, or set trainers.sequenceParallelSize"
    return "take more trainers.replicas"
