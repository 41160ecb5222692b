"""The loss of one packed row: policy loss, KL penalty, entropy bonus and value loss of its trained
tokens, summed.

    total = sum_t weight_t * ( policy_t + kl * k_t - entropy * H_t + value * 0.5 (v_t - R_t)^2 )

weight_t is the token's sequence weight times its weight in the normalisation, which a row knows.
The caller divides by the whole step's normaliser, the same number for every row on every rank. So
the gradient does not depend on how sequences were packed, nor on ranks or accumulation.

A new normalisation is one line in `NORMALIZATIONS`. Shape suffix T: the trained tokens of a packed
row, each sequence's in order.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pipelinerl_common.errors import FatalError
from pipelinerl_common.settings import AlgorithmSettings
from pipelinerl_common.types import StepPlan
from pipelinerl_trainer.losses import (
    IMPORTANCE,
    SURROGATES,
    PolicyLoss,
    kl_to_reference,
    lengths_per_sequence,
    token,
    value_loss,
)
from pipelinerl_trainer.packed import TokenColumns
from pipelinerl_trainer.scoring import TokenScores


@dataclass(frozen=True, slots=True)
class RowLoss:
    """The loss of a row, and numbers per token, without gradient, for the metrics."""

    total: Tensor
    """0-d, with gradient; 0 for a row without trained tokens."""
    policy: PolicyLoss
    ratios_T: Tensor
    """pi / mu of each token alone, before any bound, whatever the algorithm weighs by."""
    kl_T: Tensor | None
    entropy_T: Tensor
    value_error_T: Tensor | None


class Objective:
    """The job's loss as its settings define it. `max_tokens`, the longest completion, is for the
    normaliser of that name.
    """

    def __init__(self, settings: AlgorithmSettings, max_tokens: int) -> None:
        self._settings = settings
        self._max_tokens = max_tokens
        self._importance = IMPORTANCE[settings.importance]
        self._surrogate = SURROGATES[settings.surrogate]
        self._normalization = NORMALIZATIONS[settings.normalize_by]

    @property
    def needs_entropy_gradient(self) -> bool:
        return self._settings.entropy_coefficient > 0

    def normalizer(self, plan: StepPlan) -> float:
        """Returns what the sum over all rows of the step is divided by; never 0."""
        return float(max(1, self._normalization.divisor(plan, self._max_tokens)))

    def __call__(self, scores: TokenScores, columns: TokenColumns) -> RowLoss:
        """Returns the loss of a row. Raises FatalError when it lacks a column that the settings
        need.
        """
        settings = self._settings
        log_ratios_T = scores.logprobs_T.detach() - columns.old_logprobs_T
        weights_T = self._importance(log_ratios_T, columns.sequence_T)
        policy = self._surrogate(
            scores.logprobs_T, weights_T, self._advantages(scores, columns), settings
        )
        loss_T = policy.loss_T
        kl_T = None
        if columns.ref_logprobs_T is not None:
            kl_T = kl_to_reference(scores.logprobs_T, columns.ref_logprobs_T, settings.kl.estimator)
        if settings.kl.coefficient > 0 and settings.kl.placement == "loss":
            loss_T = loss_T + settings.kl.coefficient * _required(kl_T, "ref_logprobs")
        if settings.entropy_coefficient > 0:
            loss_T = loss_T - settings.entropy_coefficient * scores.entropy_T
        error_T = None
        if scores.values_T is not None:
            error_T = value_loss(scores.values_T, _required(columns.returns_T, "returns"))
            loss_T = loss_T + settings.value_coefficient * error_T
        token_weights_T = columns.weights_T * self._normalization.weights_T(columns.sequence_T)
        return RowLoss(
            total=(token_weights_T * loss_T).sum(),
            policy=policy,
            ratios_T=token(log_ratios_T, columns.sequence_T),
            kl_T=None if kl_T is None else kl_T.detach(),
            entropy_T=scores.entropy_T.detach(),
            value_error_T=None if error_T is None else error_T.detach(),
        )

    @torch.no_grad()
    def _advantages(self, scores: TokenScores, columns: TokenColumns) -> Tensor:
        """Returns generalised advantages with a value head, else those of the batch."""
        if scores.values_T is None:
            return columns.advantages_T
        returns_T = _required(columns.returns_T, "returns")
        return generalized_advantages(
            returns_T,
            scores.values_T,
            columns.sequence_T,
            discount=self._settings.discount,
            gae_lambda=self._settings.gae_lambda,
        )


def _required(column: Tensor | None, name: str) -> Tensor:
    if column is None:
        raise FatalError(
            f"the micro-batch has no {name}, which this job's loss needs: preprocessor and trainer "
            "disagree on the job"
        )
    return column


@dataclass(frozen=True, slots=True)
class Normalization:
    """A normalisation: the tokens' weights in the sum and the number that divides it."""

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


def generalized_advantages(
    returns_T: Tensor, values_T: Tensor, sequence_T: Tensor, *, discount: float, gae_lambda: float
) -> Tensor:
    """Returns the advantages of generalised advantage estimation over each sequence's tokens.

    A_t = delta_t + discount lambda A_{t+1} with delta_t = r_t + discount v_{t+1} - v_t; v and A
    are 0 behind the last token.

    Returns are R_t = r_t + discount R_{t+1}, so delta_t = e_t - discount e_{t+1} with the error e_t
    = R_t - v_t: rewards need not be known one by one. With lambda = 1 the sum telescopes to A_t =
    e_t, return minus value, which is exact then. Source: GAE (arXiv 1506.02438), equations 11 and
    16; lambda = 1 is PipelineRL (arXiv 2509.19128), equation 5.
    """
    errors_T = returns_T - values_T
    if gae_lambda == 1.0:
        return errors_T
    is_last_T = torch.ones_like(sequence_T, dtype=torch.bool)
    is_last_T[:-1] = sequence_T[1:] != sequence_T[:-1]
    next_errors_T = errors_T.roll(-1).masked_fill(is_last_T, 0.0)
    deltas = (errors_T - discount * next_errors_T).tolist()
    advantages: list[float] = []
    advantage = 0.0
    for delta, is_last in zip(reversed(deltas), reversed(is_last_T.tolist()), strict=True):
        advantage = delta + (0.0 if is_last else discount * gae_lambda * advantage)
        advantages.append(advantage)
    return errors_T.new_tensor(advantages[::-1])
