"""Tiny models, jobs and batches, made the same way in every process of a test."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from pipelinerl_common.settings import AlgorithmSettings, Job, JobSpec, parse_job
from pipelinerl_common.settings.algorithm import PRESETS
from pipelinerl_common.types import GroupId, MicroBatch, StepPlan, VersionRun
from pipelinerl_trainer import attention
from pipelinerl_trainer.attention import HALVES
from pipelinerl_trainer.engine import DeepSpeedEngine
from pipelinerl_trainer.learner import BatchReplaced, Learner, RankBatch
from pipelinerl_trainer.model import PolicyModel
from pipelinerl_trainer.ranks import Ranks
from pipelinerl_trainer.sequence_parallel import ALONE, SequenceGroup

VOCABULARY = 23
MAX_TOKENS = 16
NUM_EXPERTS = 4

SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "attn_implementation": attention.PACKED,
    "initializer_range": 0.2,
}
"""Configuration of every tiny model, by transformers' names."""

SLIDING_WINDOWS: Mapping[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": 4,
    "max_window_layers": 0,
}

ADAPTER: Mapping[str, Any] = {"rank": 4, "alpha": 6}
"""model.adapter of a job; B A is multiplied by 1.5."""


def tiny_model(seed: int = 0, *, tied: bool = True, **options: Any) -> Any:
    """Qwen3 with 2 layers, grouped-query attention, float32; the same weights for the same seed.
    `options` are its config's.
    """
    attention.register()
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(**{**SHAPE, "tie_word_embeddings": tied, **options})
    ).float()


def save_tiny_model(folder: Path, seed: int = 0, *, tied: bool = True, **options: Any) -> Path:
    tiny_model(seed, tied=tied, **options).save_pretrained(folder)
    return folder


def job(**spec: Any) -> Job:
    """A job file's content with `spec` laid over a minimal one; trainers' options are given as
    `trainers={...}`.
    """
    base: dict[str, Any] = {
        "model": {"uri": "tiny://arithmetic", "dtype": "float32", "maxModelLen": 64},
        "task": {
            "path": "tests:Task",
            "groupSize": 2,
            "sampling": {"maxTokens": MAX_TOKENS, "temperature": 0.7},
        },
        "algorithm": {"steps": 4, "groupsPerStep": 2, "optimizer": {"learningRate": 1e-3}},
        "trainers": {"microBatchTokens": 64, "parity": {"numPrompts": 0}},
        "weightTransfer": {
            "backend": "gloo",
            "bucketBytes": 2048,
            "formTimeoutSeconds": 20,
            "syncTimeoutSeconds": 20,
        },
    }
    merged = {
        key: {**base.get(key, {}), **value} if isinstance(value, dict) else value
        for key, value in spec.items()
    }
    document = {
        "apiVersion": "pipelinerl.dev/v1alpha1",
        "kind": "PipelineRLJob",
        "metadata": {"name": "toy"},
    }
    return parse_job({**document, "spec": {**base, **merged}}, source="test")


def algorithm(**options: Any) -> AlgorithmSettings:
    return job(algorithm=options).spec.algorithm


def tiny_mixture(kind: str, seed: int = 0) -> Any:
    """A mixture of 4 experts, 2 of them for each token; `kind` is its transformers model type. Asks
    for a router loss.
    """
    attention.register()
    torch.manual_seed(seed)
    router = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 1.0}
    if kind == "mixtral":
        return MixtralForCausalLM(
            MixtralConfig(**SHAPE, **router, num_local_experts=NUM_EXPERTS)
        ).float()
    experts = {
        "num_experts": NUM_EXPERTS,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **router, **experts)).float()


@dataclass(frozen=True)
class Trajectory:
    """One trajectory with everything a trained token needs; columns are over the sampled tokens."""

    tokens: list[int]
    num_prompt: int
    old_logprobs: list[float]
    ref_logprobs: list[float]
    advantages: list[float]
    returns: list[float]
    version: int = 0

    @property
    def num_sampled(self) -> int:
        return len(self.tokens) - self.num_prompt


def trajectories(count: int, seed: int = 1) -> list[Trajectory]:
    """Lengths from 3 to 14, about uniform."""
    generator = np.random.default_rng(seed)
    made = []
    for index in range(count):
        prompt, sampled = int(generator.integers(1, 6)), int(generator.integers(2, 10))
        reward = float(generator.normal())
        made.append(
            Trajectory(
                tokens=generator.integers(0, VOCABULARY, prompt + sampled).tolist(),
                num_prompt=prompt,
                old_logprobs=(-3.2 + 0.8 * generator.normal(size=sampled)).tolist(),
                ref_logprobs=(-3.2 + 0.5 * generator.normal(size=sampled)).tolist(),
                advantages=[reward] * sampled,
                returns=[reward] * sampled,
                version=index % 2,
            )
        )
    return made


def pack(
    members: Sequence[Trajectory], index: int = 0, num_slots: int = 64, temperature: float = 0.7
) -> MicroBatch:
    """One row, its sequences in the given order; no members make a filler row."""
    columns = {
        name: np.zeros(num_slots, np.float32)
        for name in ("old_logprobs", "ref_logprobs", "advantages", "returns")
    }
    ids, mask = np.zeros(num_slots, np.uint32), np.zeros(num_slots, np.uint8)
    start = 0
    for member in members:
        end = start + len(member.tokens)
        ids[start:end] = member.tokens
        mask[start + member.num_prompt : end] = 1
        for name, column in columns.items():
            column[start + member.num_prompt : end] = getattr(member, name)
        start = end
    return MicroBatch(
        index=index,
        sequence_lengths=tuple(len(member.tokens) for member in members),
        input_ids_L=ids,
        loss_mask_L=mask,
        old_logprobs_L=columns["old_logprobs"],
        advantages_L=columns["advantages"],
        ref_logprobs_L=columns["ref_logprobs"],
        returns_L=columns["returns"],
        rewards=tuple(member.returns[0] for member in members),
        sequence_weights=(1.0,) * len(members),
        version_runs=tuple(VersionRun(member.version, member.num_sampled) for member in members),
        temperature=temperature,
        group_numbers=(0,) * len(members),
    )


def plan_of(
    members: Sequence[Trajectory],
    step: int = 0,
    num_micro_batches: int = 1,
    batch_id: str = "batch",
    *,
    publish_after: bool = True,
) -> StepPlan:
    return StepPlan(
        step=step,
        batch_id=batch_id,
        group_ids=(GroupId("0-0"),),
        num_micro_batches=num_micro_batches,
        num_sequences=len(members),
        num_trained_tokens=sum(member.num_sampled for member in members),
        publish_after=publish_after,
        metrics={
            "success_mean": 0.5,
            "reward_mean": sum(member.returns[0] for member in members) / max(1, len(members)),
        },
    )


def batch_of(
    rows: Sequence[Sequence[Trajectory]], everything: Sequence[Trajectory], step: int = 0
) -> RankBatch:
    """This rank's rows of a batch that trains `everything` over all ranks."""
    micro_batches = tuple(pack(members, index) for index, members in enumerate(rows))
    return RankBatch(plan_of(everything, step, len(rows)), micro_batches)


def parts_of(
    rows: Sequence[Sequence[Trajectory]], everything: Sequence[Trajectory], step: int = 0
) -> list[RankBatch]:
    """The same batch as it comes from a streaming policy: row by row, with counts that are wrong
    until the last row.
    """
    batch = batch_of(rows, everything, step)
    parts = [
        RankBatch(
            replace(
                batch.plan,
                num_micro_batches=number,
                num_sequences=number,
                num_trained_tokens=1,
                provisional=True,
            ),
            (row,),
        )
        for number, row in enumerate(batch.micro_batches, start=1)
    ]
    return [*parts[:-1], RankBatch(batch.plan, batch.micro_batches[-1:])]


def replaced_after(parts: Sequence[RankBatch]) -> Iterator[RankBatch]:
    """Parts of a batch that is replaced before its last one."""
    yield from parts
    raise BatchReplaced("batch")


def learner(engine: DeepSpeedEngine, ranks: Ranks, settings: AlgorithmSettings) -> Learner:
    return Learner(engine, ranks, settings, MAX_TOKENS)


def train_step(learner: Learner, batch: RankBatch) -> dict[str, float]:
    """Trains a whole batch and returns the step's metrics."""
    trained = learner.train(batch)
    assert trained is not None
    return trained[1]


def tiny_policy(settings: AlgorithmSettings, sequence: SequenceGroup = ALONE) -> PolicyModel:
    """The tiny model with the head that the algorithm needs."""
    policy = PolicyModel(
        tiny_model(), with_value_head=settings.baseline == "value", sequence=sequence
    )
    spread_value_head(policy)
    return policy


def spread_value_head(policy: PolicyModel) -> None:
    """A value head that is not 0, so that its error reaches the model."""
    if policy.value_head is not None:
        with torch.no_grad():
            policy.value_head.weight.copy_(
                torch.linspace(-0.4, 0.5, policy.value_head.weight.numel())[None]
            )
            policy.value_head.bias.fill_(0.2)


ALGORITHMS: Mapping[str, dict[str, Any]] = {
    **{name: {"loss": name} for name in PRESETS},
    "value head, lambda 1": {"baseline": "value", "gaeLambda": 1.0},
    "value head, discounted": {
        "baseline": "value",
        "gaeLambda": 0.5,
        "discount": 0.9,
        "normalizeBy": "sequence_means",
    },
    "masked tokens": {"truncation": 2.0, "truncationLow": 0.5, "outside": "mask"},
    "masked sequences": {
        "importance": "geometric",
        "truncation": 1.3,
        "truncationLow": 0.7,
        "outside": "mask",
    },
    "bounded on both sides": {"truncation": 1.5, "truncationLow": 0.8, "normalizeBy": "max_tokens"},
    "no importance": {"importance": "none", "kl": {"coefficient": 0.1, "estimator": "k2"}},
    "no bound": {
        "truncation": 0,
        "kl": {"coefficient": 0.1, "estimator": "k1", "placement": "reward"},
    },
    "mixed": {"experimental": {"gradientMixing": 0.3}},
}
"""Every family of algorithms, as settings."""


def full_spec(algorithm: Mapping[str, Any] | None = None, **spec: Any) -> JobSpec:
    """A job with every term of the loss at once."""
    terms = {"entropyCoefficient": 0.01, "kl": {"coefficient": 0.1}}
    return job(algorithm={**terms, **(algorithm or {})}, reference={}, **spec).spec


def full_algorithm(**options: Any) -> AlgorithmSettings:
    return full_spec(options).algorithm


def varlen_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """torch's varlen kernel on the CPU, as strict as that of a GPU: half precision, head sizes in
    eights, int32 boundaries, windows that count the keys before the query's own.
    """
    size, dtypes = query.shape[-1], {each.dtype for each in (query, key, value)}
    assert dtypes <= set(HALVES)
    assert len(dtypes) == 1
    assert size % 8 == 0
    assert size <= 256
    assert key.shape == value.shape == (len(query), key.shape[1], size)
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    ends = cu_seq_q.tolist()
    assert cu_seq_k.tolist() == ends
    assert (ends[0], ends[-1]) == (0, len(query))
    assert max_q == max_k == max(b - a for a, b in itertools.pairwise(ends))
    left, right = window_size
    assert right == 0
    results = []
    for begin, end in itertools.pairwise(ends):
        at = torch.arange(end - begin)
        before = at[:, None] - at[None, :]
        seen = (before >= 0) & (before <= (left if left >= 0 else end))
        q, k, v = (each[begin:end].transpose(0, 1).float() for each in (query, key, value))
        k, v = (each.repeat_interleave(len(q) // len(k), dim=0) for each in (k, v))
        weights = (q @ k.mT * (size**-0.5 if scale is None else scale)).masked_fill(
            ~seen, -torch.inf
        )
        results.append((weights.softmax(-1) @ v).transpose(0, 1).to(query.dtype))
    return torch.cat(results)
