"""One optimizer step on one batch: forward and backward over its rows, then the optimizer."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from pipelinerl_common.errors import FatalError
from pipelinerl_common.settings import AlgorithmSettings
from pipelinerl_common.types import MicroBatch, StepPlan
from pipelinerl_trainer.engine import DeepSpeedEngine
from pipelinerl_trainer.metrics import StepMetrics
from pipelinerl_trainer.objective import Objective
from pipelinerl_trainer.optimizer import learning_rate
from pipelinerl_trainer.packed import PackedRow, pack_row
from pipelinerl_trainer.ranks import Ranks

log = logging.getLogger(__name__)

SKIPPED_STEPS = "skipped_steps_total"

MAX_SKIPPED_IN_A_ROW = 50
"""Consecutive steps without a finite gradient before training fails. DeepSpeed finds its loss scale
for float16 within about 30.
"""


@dataclass(frozen=True, slots=True)
class RankBatch:
    """What one rank trains in one step: the plan, equal on all ranks, and this rank's rows. With
    sequence parallelism several ranks have the same rows.
    """

    plan: StepPlan
    micro_batches: tuple[MicroBatch, ...]


class BatchReplaced(Exception):
    """The preprocessor replaced the batch while it was being trained, so its gradient is void."""


class Learner:
    """Trains batches: accumulates the gradient of the job's loss and applies it. Every rank calls
    every method with its part of the same batch.
    """

    def __init__(
        self, engine: DeepSpeedEngine, ranks: Ranks, settings: AlgorithmSettings, max_tokens: int
    ) -> None:
        self._engine = engine
        self._ranks = ranks
        self._settings = settings
        self._objective = Objective(settings, max_tokens)
        self.num_skipped_steps = 0
        self._num_skipped_in_a_row = 0

    def train(
        self, batch: RankBatch, parts: Iterable[RankBatch] = ()
    ) -> tuple[StepPlan, dict[str, float]] | None:
        """Trains a batch and returns its final plan and the step's metrics by name, the same on
        every rank. A batch with a provisional plan is still growing and comes as `parts`, of which
        `batch` is the first; returns None when it was replaced meanwhile, and then nothing of it is
        left.

        A step whose loss or gradient is not finite leaves the weights unchanged; it is counted and
        logged as an error. Raises FatalError after too many of those in a row and when the step
        made weights that are not finite, and what `parts` raises.
        """
        plan = batch.plan
        if not plan.provisional:
            metrics = self.accumulate(batch)
        else:
            try:
                plan, metrics = self.accumulate_parts(parts)
            except BatchReplaced as error:
                log.warning("step=%d batch=%s was replaced and is pulled again", plan.step, error)
                return None
        rate = learning_rate(plan.step, self._settings.steps, self._settings.optimizer)
        metrics.reduce(self._ranks)
        outcome = self._engine.apply(rate, metrics.lag_mean.value)
        values = metrics.values()
        if outcome.applied:
            self._num_skipped_in_a_row = 0
            self._check_weights(plan, rate, outcome.grad_norm)
            values["grad_norm"] = outcome.grad_norm
        else:
            self._count_skipped(plan, metrics)
        return plan, values | {"learning_rate": rate, SKIPPED_STEPS: float(self.num_skipped_steps)}

    def accumulate(self, batch: RankBatch) -> StepMetrics:
        """Runs forward and backward over a whole batch. Its gradient is complete afterwards and not
        yet applied.
        """
        plan, metrics = batch.plan, StepMetrics()
        normalizer = self._objective.normalizer(plan)
        for number, row in enumerate(batch.micro_batches, start=1):
            is_last = number == plan.num_micro_batches
            self._accumulate_row(row, plan.step, normalizer, metrics, is_last=is_last)
        return metrics

    def accumulate_parts(self, parts: Iterable[RankBatch]) -> tuple[StepPlan, StepMetrics]:
        """Does the same for a batch that arrives in parts, and returns its final plan.

        The batch's normaliser is not known before its last part. Losses are divided by a guess, the
        same on every rank, and at the end the gradient is scaled by what the guess was wrong by.
        After BatchReplaced the accumulated gradient is discarded.
        """
        metrics, num_done = StepMetrics(), 0
        guess, plan = float(self._settings.groups_per_step), None
        try:
            for part in parts:
                plan = part.plan
                for row in part.micro_batches:
                    num_done += 1
                    is_last = not plan.provisional and num_done == plan.num_micro_batches
                    self._accumulate_row(row, plan.step, guess, metrics, is_last=is_last)
        except BatchReplaced:
            if num_done:
                self._discard_gradient()
            raise
        if plan is None:
            raise ValueError("a batch has at least one part")
        correction = guess / self._objective.normalizer(plan)
        if correction != 1.0:
            self._engine.scale_gradient(correction)
            metrics.loss.value *= correction
        return plan, metrics

    def _accumulate_row(
        self,
        micro_batch: MicroBatch,
        step: int,
        normalizer: float,
        metrics: StepMetrics,
        *,
        is_last: bool,
    ) -> None:
        row, columns = pack_row(micro_batch, self._ranks.device)
        scores = self._engine.score(row, entropy_gradient=self._objective.needs_entropy_gradient)
        row_loss = self._objective(scores, columns)
        loss = row_loss.total / normalizer
        self._engine.accumulate(loss, is_last=is_last)
        if self._ranks.sequence.index == 0:  # ranks that share the row have the same numbers
            metrics.add_row(micro_batch, step, row_loss, float(loss.detach()))

    def _discard_gradient(self) -> None:
        """Clears what was accumulated. The one way that every ZeRO stage has is a gradient that is
        not finite: DeepSpeed clears it without applying it.
        """
        tokens = torch.tensor([0, 1], device=self._ranks.device)
        row = PackedRow(tokens, tokens, (2,), tokens[1:], temperature=1.0)
        not_finite = self._engine.score(row).logprobs_T.sum() * float("nan")
        self._engine.accumulate(not_finite, is_last=True)
        if self._engine.apply(learning_rate=0.0).applied:
            raise FatalError(
                "a gradient that is not a number was applied: restart from the last checkpoint"
            )

    def _check_weights(self, plan: StepPlan, rate: float, grad_norm: float) -> None:
        if not self._engine.weights_are_finite():
            raise FatalError(
                f"step {plan.step}: the optimizer made weights that are not finite, from a "
                f"gradient of norm {grad_norm:.3g} and a learning rate of {rate:.3g}: lower "
                "algorithm.optimizer.learningRate; nothing of this step is kept"
            )

    def _count_skipped(self, plan: StepPlan, metrics: StepMetrics) -> None:
        self.num_skipped_steps += 1
        self._num_skipped_in_a_row += 1
        log.error(
            "alert=non_finite_step step=%d the gradient is not finite, so the weights stay "
            "unchanged: %d micro-batches had a loss that is not finite; groups %s",
            plan.step,
            int(metrics.non_finite_micro_batches.value),
            ", ".join(plan.group_ids[:8]) + (" ..." if len(plan.group_ids) > 8 else ""),
        )
        if self._num_skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
            raise FatalError(
                f"step {plan.step}: {MAX_SKIPPED_IN_A_ROW} steps in a row had a gradient that is "
                "not finite, so nothing is learned; model.dtype bfloat16 or float32 has a larger "
                "range than float16"
            )
