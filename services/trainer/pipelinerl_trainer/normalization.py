"""From per-token losses to the step's loss: a sum over tokens with weights that a row knows,
divided by a number that is the same for every row on every rank. So the gradient does not depend on
how sequences were packed, nor on ranks or accumulation.

A new normalisation is one line in `NORMALIZATIONS`. Shape suffix T: the trained tokens of a packed
row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pipelinerl_common.types import StepPlan
from pipelinerl_trainer.importance import lengths_per_sequence


@dataclass(frozen=True, slots=True)
class Normalization:
    """`weights_T(sequence_T)` of the tokens in the sum and `divisor(plan, max_tokens)` of it."""

    weights_T: Callable[[Tensor], Tensor]
    divisor: Callable[[StepPlan, int], float]


def _ones(sequence_T: Tensor) -> Tensor:
    return torch.ones(len(sequence_T), device=sequence_T.device)


def _inverse_lengths(sequence_T: Tensor) -> Tensor:
    return 1.0 / lengths_per_sequence(sequence_T, torch.float32)


NORMALIZATIONS: Mapping[str, Normalization] = {
    # (1/N) sum_i sum_t: the paper's 1/m over sequences (arXiv 2509.19128, equation 5). Long
    # sequences weigh more.
    "sequences": Normalization(_ones, lambda plan, max_tokens: plan.num_sequences),
    # (1/sum_i n_i) sum_i sum_t: DAPO's token-level loss (arXiv 2503.14476, equation 12).
    "tokens": Normalization(_ones, lambda plan, max_tokens: plan.num_trained_tokens),
    # (1/N) sum_i (1/n_i) sum_t: GRPO (arXiv 2402.03300, equation 3) and GSPO. Each sequence weighs
    # the same.
    "sequence_means": Normalization(_inverse_lengths, lambda plan, max_tokens: plan.num_sequences),
    # (1/(N max_tokens)) sum_i sum_t: Dr. GRPO's constant (arXiv 2503.20783, section 3.2), free of
    # any length bias.
    "max_tokens": Normalization(_ones, lambda plan, max_tokens: plan.num_sequences * max_tokens),
}
