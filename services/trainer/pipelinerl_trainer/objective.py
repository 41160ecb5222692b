"""The loss of one packed row: policy loss, KL penalty, entropy bonus and value loss of its trained
tokens, summed.

    total = sum_t weight_t * ( policy_t + kl * k_t - entropy * H_t + value * 0.5 (v_t - R_t)^2 )

weight_t is that of the token's sequence times what the normalisation gives it. Dividing by the
whole step's normaliser is the caller's: it is the same number for every row, on every rank, so that
the gradient does not depend on how sequences were packed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pipelinerl_common.errors import FatalError
from pipelinerl_common.settings import AlgorithmSettings
from pipelinerl_common.types import StepPlan
from pipelinerl_trainer.gae import generalized_advantages
from pipelinerl_trainer.importance import IMPORTANCE, token
from pipelinerl_trainer.losses import SURROGATES, PolicyLoss, kl_to_reference, value_loss
from pipelinerl_trainer.normalization import NORMALIZATIONS
from pipelinerl_trainer.packed import TokenColumns
from pipelinerl_trainer.scoring import TokenScores


@dataclass(frozen=True, slots=True)
class RowLoss:
    """A row's loss, and per-token numbers for the metrics (without gradient)."""

    total: Tensor
    """0-d, with gradient; 0 for a row without trained tokens."""
    policy: PolicyLoss
    ratios_T: Tensor
    """pi / mu of each token alone, before any bound, whatever the algorithm weighs by."""
    kl_T: Tensor | None
    entropy_T: Tensor
    value_error_T: Tensor | None


class Objective:
    """The job's loss, from its settings. `max_tokens` is the longest completion, for the normaliser
    of that name.
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
        """What the sum over all rows of the step is divided by; never 0."""
        return float(max(1, self._normalization.divisor(plan, self._max_tokens)))

    def __call__(self, scores: TokenScores, columns: TokenColumns) -> RowLoss:
        """Raises FatalError when the row lacks a column that the settings need."""
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
        """With a value head, generalised advantages; else those that came with the batch."""
        if scores.values_T is None:
            return columns.advantages_T
        returns_T = _required(columns.returns_T, "returns")
        lam, discount = self._settings.gae_lambda, self._settings.discount
        return generalized_advantages(
            returns_T, scores.values_T, columns.sequence_T, discount=discount, gae_lambda=lam
        )


def _required(column: Tensor | None, name: str) -> Tensor:
    if column is None:
        raise FatalError(
            f"the micro-batch has no {name}, which this job's loss needs: preprocessor and trainer "
            "disagree on the job"
        )
    return column
