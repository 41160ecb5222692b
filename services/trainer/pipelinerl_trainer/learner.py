"""One optimizer step on one batch."""

import logging
from dataclasses import dataclass

from pipelinerl_common.settings import AlgorithmSettings
from pipelinerl_common.types import MicroBatch, StepPlan
from pipelinerl_trainer.engine import Engine
from pipelinerl_trainer.metrics import StepMetrics
from pipelinerl_trainer.objective import Objective
from pipelinerl_trainer.packed import pack_row
from pipelinerl_trainer.ranks import Ranks
from pipelinerl_trainer.schedule import learning_rate

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one rank trains in one step: the plan, equal on all ranks, and this rank's rows."""

    plan: StepPlan
    micro_batches: tuple[MicroBatch, ...]


class Learner:
    """Forward and backward over a batch's micro-batches, then the optimizer. Every rank calls it with its part of one batch."""

    def __init__(self, engine: Engine, ranks: Ranks, settings: AlgorithmSettings) -> None:
        self._engine = engine
        self._ranks = ranks
        self._settings = settings
        self._objective = Objective(settings)
        self.num_skipped_steps = 0

    def train_step(self, batch: Batch) -> dict[str, float]:
        """Trains `batch` and returns the step's metrics by name, the same on every rank.

        A step whose loss or gradient is not finite leaves the weights as they are; it is counted and logged as an error.
        """
        step = batch.plan.step
        metrics = self.accumulate(batch)
        rate = learning_rate(step, self._settings.steps, self._settings.optimizer)
        outcome = self._engine.apply(rate)
        metrics.reduce(self._ranks)
        if not outcome.applied:
            self.num_skipped_steps += 1
            self._report_skipped(batch.plan, metrics)
        values = metrics.values()
        if outcome.applied:
            values["grad_norm"] = outcome.grad_norm
        return values | {"learning_rate": rate, "skipped_steps_total": float(self.num_skipped_steps)}

    def accumulate(self, batch: Batch) -> StepMetrics:
        """Forward and backward only: the gradient is there afterwards, and not yet applied."""
        metrics = StepMetrics()
        normalizer = self._objective.normalizer(batch.plan)
        for number, micro_batch in enumerate(batch.micro_batches, start=1):
            row, columns = pack_row(micro_batch, self._ranks.device)
            scores = self._engine.score(row, entropy_gradient=self._objective.needs_entropy_gradient)
            row_loss = self._objective(scores, columns)
            loss = row_loss.total / normalizer
            self._engine.accumulate(loss, is_last=number == len(batch.micro_batches))
            metrics.add_row(micro_batch, batch.plan.step, row_loss, float(loss.detach()))
        return metrics

    def _report_skipped(self, plan: StepPlan, metrics: StepMetrics) -> None:
        log.error(
            "alert=non_finite_step step=%d the gradient is not finite, the weights stay as they were: %d micro-batches had a "
            "loss that is not finite; groups %s",
            plan.step,
            int(metrics.non_finite_micro_batches.value),
            ", ".join(plan.group_ids[:8]) + (" ..." if len(plan.group_ids) > 8 else ""),
        )
