"""The bench of deltas counts how many bytes of bfloat16 weights an optimizer step changes.

It is a real run of GRPO with the product's optimizer; every step's weights are encoded, decoded and
compared bit by bit.

The policy samples completions of random prompts and is rewarded for even token ids. Forward and
backward use the weights rounded to bfloat16 and the optimizer keeps them in float32, as the trainer
does. A random model of 1.2 million weights stands in when none is given.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from bench.report import Row, Value, progress
from pipelinerl_common.errors import PermanentError
from pipelinerl_common.settings import OptimizerSettings
from pipelinerl_trainer.optimizer import make_optimizer
from pipelinerl_weights.delta import decode, encode

LEARNING_RATES = (1e-6, 1e-5, 2e-5)
CHUNK_BYTES = 64 << 20
GROUPS, GROUP_SIZE, PROMPT_TOKENS, COMPLETION_TOKENS = 2, 8, 4, 16


def measure(model: Path | None, num_steps: int, seed: int) -> dict[str, dict[str, Value]]:
    """Returns bytes over full by step for every learning rate."""
    values: dict[str, dict[str, Value]] = {}
    for rate in LEARNING_RATES:
        progress(f"{num_steps} optimizer steps at learning rate {rate:g}")
        torch.manual_seed(seed)
        policy = _random_model() if model is None else AutoModelForCausalLM.from_pretrained(model)
        ratios = list(bytes_over_full(policy, rate, num_steps))
        values[f"{rate:g}"] = {
            "bytes_over_full": {str(step + 1): ratio for step, ratio in enumerate(ratios)},
            "median": median(ratios),
            "largest": max(ratios),
        }
    return values


def rows(values: dict[str, dict[str, Value]]) -> Sequence[Row]:
    """Returns the report's lines."""
    return [
        Row(
            f"delta at learning rate {rate}: bytes / full",
            f"median {each['median']:.4f}",
            f"largest {each['largest']:.4f}",
        )
        for rate, each in values.items()
    ]


def bytes_over_full(policy: Any, learning_rate: float, num_steps: int) -> Iterator[float]:
    """Yields, for every optimizer step, the bytes of its deltas over those of all weights. Raises
    PermanentError if a decoded delta is not the step's weights, bit by bit.
    """
    policy.float().eval()
    weights = list(policy.parameters())
    # From a bfloat16 checkpoint, so the float32 weights begin on bfloat16 numbers.
    masters = [nn.Parameter(weight.detach().bfloat16().float()) for weight in weights]
    optimizer = make_optimizer(masters, OptimizerSettings(learning_rate=learning_rate))
    held = _publish(masters, weights)
    for step in range(num_steps):
        _backward(policy)
        nn.utils.clip_grad_norm_(weights, OptimizerSettings().max_grad_norm)
        for master, weight in zip(masters, weights, strict=True):
            master.grad, weight.grad = weight.grad, None
        optimizer.step()
        new = _publish(masters, weights)
        sent = 0
        for mine, theirs in zip(
            *(torch.split(each, CHUNK_BYTES) for each in (new, held)), strict=True
        ):
            encoded = encode(mine, theirs)
            sent += len(encoded)
            decode(encoded, theirs)
        if not torch.equal(held, new):
            raise PermanentError(f"step {step}: the decoded weights are not those that were sent")
        yield sent / len(new)


@torch.no_grad()
def _publish(masters: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Rounds the weights to bfloat16 for the next step and returns their bytes."""
    rounded = [master.bfloat16() for master in masters]
    for weight, value in zip(weights, rounded, strict=True):
        weight.copy_(value)
    return torch.cat([value.flatten() for value in rounded]).view(torch.uint8)


def _backward(policy: Any) -> None:
    """Samples groups of completions and adds the gradient of their policy loss."""
    vocabulary = policy.config.vocab_size
    prompts = torch.randint(0, vocabulary, (GROUPS, PROMPT_TOKENS)).repeat_interleave(GROUP_SIZE, 0)
    tokens = policy.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        top_k=0,
        min_new_tokens=COMPLETION_TOKENS,
        max_new_tokens=COMPLETION_TOKENS,
        pad_token_id=0,
    )
    completions = tokens[:, PROMPT_TOKENS:]
    rewards = (completions % 2 == 0).float().mean(1).view(GROUPS, GROUP_SIZE)
    deviation = rewards.std(1, keepdim=True) + 1e-6
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / deviation).view(-1, 1)
    logits = policy(input_ids=tokens).logits[:, PROMPT_TOKENS - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(-1, completions[..., None])[..., 0]
    (-(advantages * logprobs).mean()).backward()


def _random_model() -> Any:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=2048,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            tie_word_embeddings=True,
        )
    )
