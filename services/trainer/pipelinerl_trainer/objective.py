"""The loss of one packed row: policy loss, KL penalty, entropy bonus and value loss of its trained tokens, summed.

    total = sum_t weight_t * ( policy_t + kl * k3_t - entropy * H_t + value * 0.5 (v_t - R_t)^2 )

Dividing by the whole step's number of sequences or trained tokens is the caller's: it is the same number for every row, on
every rank, so that the gradient does not depend on how sequences were packed.
"""

from dataclasses import dataclass

from torch import Tensor

from pipelinerl_common.errors import FatalError
from pipelinerl_common.settings import AlgorithmSettings
from pipelinerl_common.types import StepPlan
from pipelinerl_trainer.losses import POLICY_LOSSES, PolicyLoss, kl_to_reference, value_loss
from pipelinerl_trainer.packed import TokenColumns
from pipelinerl_trainer.scoring import TokenScores


@dataclass(frozen=True, slots=True)
class RowLoss:
    """A row's loss, and per-token numbers for the metrics (without gradient)."""

    total: Tensor
    """0-d, with gradient; 0 for a row without trained tokens."""
    policy: PolicyLoss
    kl_T: Tensor | None
    entropy_T: Tensor
    value_error_T: Tensor | None


class Objective:
    """The job's loss, from its settings."""

    def __init__(self, settings: AlgorithmSettings) -> None:
        self._settings = settings
        self._policy_loss = POLICY_LOSSES[settings.loss]

    @property
    def needs_entropy_gradient(self) -> bool:
        return self._settings.entropy_coefficient > 0

    def normalizer(self, plan: StepPlan) -> float:
        """What the sum over all rows of the step is divided by; never 0."""
        by_sequences = self._settings.normalize_by == "sequences"
        return float(max(1, plan.num_sequences if by_sequences else plan.num_trained_tokens))

    def __call__(self, scores: TokenScores, columns: TokenColumns) -> RowLoss:
        """Raises FatalError when the row lacks a column that the settings need."""
        settings = self._settings
        policy = self._policy_loss(scores.logprobs_T, columns.old_logprobs_T, self._advantages(scores, columns), settings)
        loss_T = policy.loss_T
        kl_T = None if columns.ref_logprobs_T is None else kl_to_reference(scores.logprobs_T, columns.ref_logprobs_T)
        if settings.kl.coefficient > 0:
            loss_T = loss_T + settings.kl.coefficient * _required(kl_T, "ref_logprobs")
        if settings.entropy_coefficient > 0:
            loss_T = loss_T - settings.entropy_coefficient * scores.entropy_T
        error_T = None
        if scores.values_T is not None:
            error_T = value_loss(scores.values_T, _required(columns.returns_T, "returns"))
            loss_T = loss_T + settings.value_coefficient * error_T
        return RowLoss(
            total=(columns.weights_T * loss_T).sum(),
            policy=policy,
            kl_T=None if kl_T is None else kl_T.detach(),
            entropy_T=scores.entropy_T.detach(),
            value_error_T=None if error_T is None else error_T.detach(),
        )

    def _advantages(self, scores: TokenScores, columns: TokenColumns) -> Tensor:
        """With a value head, return minus value, without gradient; else those that came with the batch."""
        if scores.values_T is None:
            return columns.advantages_T
        return _required(columns.returns_T, "returns") - scores.values_T.detach()


def _required(column: Tensor | None, name: str) -> Tensor:
    if column is None:
        raise FatalError(
            f"the micro-batch has no {name}, which this job's loss needs: preprocessor and trainer disagree on the job"
        )
    return column
