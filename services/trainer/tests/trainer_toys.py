"""Tiny models and batches, made the same way in every process of a test."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from pipelinerl_common.settings import AlgorithmSettings, Job, parse_job
from pipelinerl_common.types import GroupId, MicroBatch, StepPlan, VersionRun
from pipelinerl_trainer import attention
from pipelinerl_trainer.learner import Batch, BatchReplaced

VOCABULARY = 23


def tiny_model(seed: int = 0, *, tied: bool = True) -> Any:
    """Qwen3 with 2 layers, grouped-query attention, float32; the same weights for the same seed."""
    attention.register()
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        attn_implementation=attention.PACKED,
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config).float()


def save_tiny_model(folder: Path, seed: int = 0, *, tied: bool = True) -> Path:
    tiny_model(seed, tied=tied).save_pretrained(folder)
    return folder


def job(**spec: Any) -> Job:
    """A job file's content with `spec` laid over a minimal one; trainers' options are given as `trainers={...}`."""
    base: dict[str, Any] = {
        "model": {"uri": "tiny://arithmetic", "dtype": "float32", "maxModelLen": 64},
        "task": {"path": "tests:Task", "groupSize": 2, "sampling": {"maxTokens": 16, "temperature": 0.7}},
        "algorithm": {"steps": 4, "groupsPerStep": 2, "optimizer": {"learningRate": 1e-3}},
        "trainers": {"microBatchTokens": 64, "parity": {"numPrompts": 0}},
        "weightTransfer": {"backend": "gloo", "bucketBytes": 2048, "formTimeoutSeconds": 20, "syncTimeoutSeconds": 20},
    }
    merged = {key: {**base.get(key, {}), **value} if isinstance(value, dict) else value for key, value in spec.items()}
    document = {"apiVersion": "pipelinerl.dev/v1alpha1", "kind": "PipelineRLJob", "metadata": {"name": "toy"}}
    return parse_job({**document, "spec": {**base, **merged}}, source="test")


def algorithm(**options: Any) -> AlgorithmSettings:
    return job(algorithm={"steps": 4, "groupsPerStep": 2, **options}).spec.algorithm


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


def pack(members: Sequence[Trajectory], index: int = 0, num_slots: int = 64, temperature: float = 0.7) -> MicroBatch:
    """One row, its sequences in the given order; no members make a filler row."""
    columns = {name: np.zeros(num_slots, np.float32) for name in ("old_logprobs", "ref_logprobs", "advantages", "returns")}
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
        metrics={"success_mean": 0.5, "reward_mean": sum(member.returns[0] for member in members) / max(1, len(members))},
    )


def batch_of(rows: Sequence[Sequence[Trajectory]], everything: Sequence[Trajectory], step: int = 0) -> Batch:
    """This rank's rows of a batch that trains `everything` over all ranks."""
    micro_batches = tuple(pack(members, index) for index, members in enumerate(rows))
    return Batch(plan_of(everything, step, len(rows)), micro_batches)


def parts_of(rows: Sequence[Sequence[Trajectory]], everything: Sequence[Trajectory], step: int = 0) -> list[Batch]:
    """The same batch as it comes from a streaming policy: row by row, with counts that are wrong until the last row."""
    batch = batch_of(rows, everything, step)
    parts = [
        Batch(
            replace(batch.plan, num_micro_batches=number, num_sequences=number, num_trained_tokens=1, provisional=True), (row,)
        )
        for number, row in enumerate(batch.micro_batches, start=1)
    ]
    return [*parts[:-1], Batch(batch.plan, batch.micro_batches[-1:])]


def replaced_after(parts: Sequence[Batch]) -> Iterator[Batch]:
    """Parts of a batch that is replaced before its last one."""
    yield from parts
    raise BatchReplaced("batch")


def reference_gradient(settings: AlgorithmSettings, members: Sequence[Trajectory]) -> dict[str, torch.Tensor]:
    """The gradient of the step's loss by the plainest means: no packing, no DeepSpeed, one sequence at a time."""
    model = tiny_model()
    model.set_attn_implementation("eager")
    total = torch.zeros(())
    for member in members:
        ids = torch.tensor([member.tokens])
        distribution = (model(input_ids=ids).logits[0, :-1].float() / 0.7).log_softmax(-1)[member.num_prompt - 1 :]
        logprobs = distribution.gather(-1, ids[0, member.num_prompt :, None])[:, 0]
        old, reference = torch.tensor(member.old_logprobs), torch.tensor(member.ref_logprobs)
        advantages = torch.tensor(member.advantages)
        weights = torch.exp(logprobs - old)
        if settings.loss == "reinforce":
            policy = -weights.detach().clamp(max=settings.truncation) * advantages * logprobs
        else:
            clipped = weights.clamp(1 - settings.clip_low, 1 + settings.clip_high)
            policy = -torch.minimum(weights * advantages, clipped * advantages)
        k3 = torch.exp(reference - logprobs) - (reference - logprobs) - 1
        entropy = -(distribution.exp() * distribution).sum(-1)
        total = total + (policy + settings.kl.coefficient * k3 - settings.entropy_coefficient * entropy).sum()
    count = len(members) if settings.normalize_by == "sequences" else sum(member.num_sampled for member in members)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(total / count, parameters), strict=True))


def full_algorithm(**options: Any) -> AlgorithmSettings:
    """Every term of the loss at once."""
    spec = job(
        algorithm={"steps": 4, "groupsPerStep": 2, "entropyCoefficient": 0.01, "kl": {"coefficient": 0.1}, **options},
        reference={},
    )
    return spec.spec.algorithm
