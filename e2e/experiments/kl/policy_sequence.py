"""Consecutive policies: a tiny model trained on a task with long completions, its weights kept
after every optimizer step.

The task: a prompt is PERIOD random digits, and every token of the completion should equal the one
PERIOD places before it. So a token depends on keys and values that were computed PERIOD tokens
earlier, under older weights if an update came between. The base model has a supervised start on
streams of digits that repeat only now and then. From there on rows, advantages, losses and
optimizer are those of preprocessor and trainer; every batch is on-policy.

Shape suffixes: N sequences, P tokens of a prompt, T sampled tokens, S both, V vocabulary.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from pipelinerl_actor.models import tiny
from pipelinerl_common.settings import Job, parse_job
from pipelinerl_common.types import MicroBatch, StepPlan, VersionRun
from pipelinerl_preprocessor.advantage import advantages
from pipelinerl_preprocessor.rows import TrainSequence, build_row
from pipelinerl_trainer.model import PolicyModel, load_policy
from pipelinerl_trainer.objective import Objective
from pipelinerl_trainer.optimizer import make_optimizer
from pipelinerl_trainer.packed import pack_row

PERIOD = 24
DIGITS = [len(tiny.SPECIAL_TOKENS) + tiny.CHARACTERS.index(digit) for digit in "0123456789"]
BASE_SHARE = 0.4
"""Share of the base's tokens that repeat on purpose."""

Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that determines the checkpoints."""

    num_tokens: int
    """Tokens of a completion; none ends earlier."""
    num_steps: int
    seed: int = 0
    groups: int = 8
    group_size: int = 8
    learning_rate: float = 2e-4
    base_steps: int = 300
    base_tokens: int = 72
    """Tokens of a stream in the supervised start."""


@dataclass(frozen=True, slots=True)
class PolicySequence:
    """The base model's folder, and the weights after 0, 1, 2, ... optimizer steps."""

    folder: Path
    job: Job
    weights: list[Weights]
    rewards: list[float]
    """Mean reward of the batch that each step trained."""


def train(recipe: Recipe, folder: Path) -> Iterator[PolicySequence]:
    """Yields the sequence so far, first with the base alone, then after every step; it is the same
    growing object.
    """
    random = torch.Generator().manual_seed(recipe.seed)
    base = make_base(recipe, random)
    tiny.save(base, folder)
    job = _job(recipe, folder)
    policy = load_policy(folder, job.spec, torch.device("cpu"))
    optimizer = make_optimizer(policy.parameters(), job.spec.algorithm.optimizer)
    sampler = sampling_model(folder)
    policies = PolicySequence(folder, job, [_copy(policy)], [])
    yield policies
    for step in range(recipe.num_steps):
        sampler.load_state_dict(policies.weights[-1])
        prompts_NP = make_prompts(recipe.groups, random).repeat_interleave(recipe.group_size, 0)
        ids_NS, logprobs_NT = sample(sampler, prompts_NP, recipe.num_tokens, random)
        rewards_N = _rewards(ids_NS)
        _step(
            policy,
            optimizer,
            job,
            step,
            _sequences(recipe, job, step, ids_NS, logprobs_NT, rewards_N),
        )
        policies.weights.append(_copy(policy))
        policies.rewards.append(float(rewards_N.mean()))
        yield policies


def make_prompts(count: int, random: torch.Generator) -> Tensor:
    """Random digits, [N, PERIOD]."""
    return torch.tensor(DIGITS)[torch.randint(len(DIGITS), (count, PERIOD), generator=random)]


def sampling_model(folder: Path) -> Any:
    """The model as transformers builds it; the trainer's takes packed rows only."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def make_base(recipe: Recipe, random: torch.Generator) -> Any:
    """The model after its supervised start."""
    shape = tiny.TinyShape(max_model_len=PERIOD + max(recipe.num_tokens, recipe.base_tokens))
    model = tiny.make_model(shape, recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(recipe.base_steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * (1 - step / recipe.base_steps)
        # First the model learns to repeat, then how seldom that is asked for.
        ids_NS = _streams(
            32, recipe.base_tokens, 0.9 if 2 * step < recipe.base_steps else BASE_SHARE, random
        )
        logits_NSV = model(input_ids=ids_NS, use_cache=False).logits[:, PERIOD - 1 : -1]
        loss = nn.functional.cross_entropy(logits_NSV.flatten(0, 1), ids_NS[:, PERIOD:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def _streams(count: int, num_tokens: int, share: float, random: torch.Generator) -> Tensor:
    """Digits [N, PERIOD + T]; `share` of them repeat on purpose, a tenth of the rest by chance."""
    ids_NS = torch.cat([make_prompts(count, random) for _ in range(2 + num_tokens // PERIOD)], 1)[
        :, : PERIOD + num_tokens
    ]
    repeats_NS = torch.rand(ids_NS.shape, generator=random) < share
    for at in range(PERIOD, ids_NS.shape[1]):
        ids_NS[:, at] = torch.where(repeats_NS[:, at], ids_NS[:, at - PERIOD], ids_NS[:, at])
    return ids_NS


@torch.inference_mode()
def sample(
    model: Any, prompts_NP: Tensor, num_tokens: int, random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Ids [N, S] with the prompts, and log-probabilities [N, T] of what was sampled, all sequences
    at once.
    """
    cache, tokens, logprobs = DynamicCache(config=model.config), [prompts_NP], []
    for _ in range(num_tokens):
        logits_NV = model(
            input_ids=tokens[-1], past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        logprobs_NV = logits_NV.log_softmax(-1)
        tokens.append(torch.multinomial(logprobs_NV.exp(), 1, generator=random))
        logprobs.append(logprobs_NV.gather(1, tokens[-1]))
    return torch.cat(tokens, 1), torch.cat(logprobs, 1)


def _rewards(ids_NS: Tensor) -> Tensor:
    """Rewards [N] in float64: the share of sampled tokens that repeat."""
    return (ids_NS[:, PERIOD:] == ids_NS[:, :-PERIOD]).double().mean(1)


def _sequences(
    recipe: Recipe, job: Job, step: int, ids_NS: Tensor, logprobs_NT: Tensor, rewards_N: Tensor
) -> Iterator[TrainSequence]:
    groups = rewards_N.view(recipe.groups, recipe.group_size).numpy()
    advantages_N = np.concatenate([advantages(group, job.spec.algorithm) for group in groups])
    for ids_S, logprobs_T, reward, advantage in zip(
        ids_NS, logprobs_NT, rewards_N.tolist(), advantages_N, strict=True
    ):
        yield TrainSequence(
            token_ids_S=ids_S.numpy().astype(np.uint32),
            segment_lengths=(PERIOD, recipe.num_tokens),
            logprobs_T=logprobs_T.numpy(),
            ref_logprobs_T=None,
            version_runs=(VersionRun(step, recipe.num_tokens),),
            advantage=float(advantage),
            returns_T=None,
            reward=reward,
        )


def _step(
    policy: PolicyModel,
    optimizer: torch.optim.Optimizer,
    job: Job,
    step: int,
    sequences: Iterable[TrainSequence],
) -> None:
    settings, rows = job.spec.algorithm, list(_rows(job, list(sequences)))
    objective = Objective(settings, job.spec.task.sampling.max_tokens)
    plan = StepPlan(
        step=step,
        batch_id=f"step-{step}",
        group_ids=(),
        num_micro_batches=len(rows),
        num_sequences=sum(len(row.sequence_lengths) for row in rows),
        num_trained_tokens=sum(row.num_trained for row in rows),
        publish_after=True,
        metrics={},
    )
    optimizer.zero_grad()
    for micro_batch in rows:
        row, columns = pack_row(micro_batch, torch.device("cpu"))
        loss = objective(policy(row), columns).total / objective.normalizer(plan)
        loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(policy.parameters(), settings.optimizer.max_grad_norm)
    optimizer.step()


def _rows(job: Job, sequences: list[TrainSequence]) -> Iterator[MicroBatch]:
    """Packs the sequences into rows; all have the same length, so every row holds as many."""
    slots = job.spec.trainers.micro_batch_tokens
    each = slots // sequences[0].num_tokens
    for index, first in enumerate(range(0, len(sequences), each)):
        members = [(0, sequence) for sequence in sequences[first : first + each]]
        yield build_row(index, members, slots, temperature=1.0, reference=False, returns=False)


def _job(recipe: Recipe, folder: Path) -> Job:
    longest = PERIOD + recipe.num_tokens
    spec = {
        "model": {"uri": str(folder), "dtype": "float32", "maxModelLen": longest},
        "task": {
            "path": "repeat:Digits",
            "groupSize": recipe.group_size,
            "sampling": {"maxTokens": recipe.num_tokens},
        },
        "algorithm": {
            "steps": max(1, recipe.num_steps),
            "groupsPerStep": recipe.groups,
            "optimizer": {"learningRate": recipe.learning_rate},
        },
        "trainers": {"microBatchTokens": max(4096, longest)},
    }
    document = {
        "apiVersion": "pipelinerl.dev/v1alpha1",
        "kind": "PipelineRLJob",
        "metadata": {"name": "kl-study"},
    }
    return parse_job({**document, "spec": spec}, source="kl study")


def _copy(policy: PolicyModel) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in policy.model_parameters()}
