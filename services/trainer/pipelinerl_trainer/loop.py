"""The training loop.

    every rank                             rank 0 beside it, in the event loop
    ----------                             -----------------------------------
    pull the batch of step k     <------   preprocessor (assembles it at this moment)
    forward, backward, all rows
    optimizer step
    commit step k                ------>   preprocessor (acknowledges the samples)
    share of version k+1         ------>   publisher -> coordinator, generators -> MarkPublished
    checkpoint, when due
    report                       ------>   log, metrics stream

Weights of version k have seen k optimizer steps; step k (from 0) is trained at version k and makes
version k+1. A step that was skipped because its gradient was not finite makes a version too, with
the same weights: its samples are used up.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from pipelinerl.v1 import batches_pb2
from pipelinerl_common.metrics.catalog import PHASES
from pipelinerl_common.settings import JobSpec
from pipelinerl_common.tracing import Tracer, span
from pipelinerl_common.types import StepPlan
from pipelinerl_trainer.checkpoint import Checkpointer
from pipelinerl_trainer.engine import DeepSpeedEngine
from pipelinerl_trainer.event_loop import EventLoopProxy
from pipelinerl_trainer.learner import Learner, RankBatch
from pipelinerl_trainer.membership import PolicyServicer
from pipelinerl_trainer.parity import ParityCheck
from pipelinerl_trainer.publisher import Offer, Publisher
from pipelinerl_trainer.ranks import Ranks, Vote
from pipelinerl_trainer.report import Reporter, StepReport
from pipelinerl_trainer.served_share import ServedShare
from pipelinerl_trainer.source import BatchSource, TrainingStopped

log = logging.getLogger(__name__)

PUBLISHED_POLL_S = 0.2

Item = TypeVar("Item")


class StepTimer:
    """The seconds that one step spent in each phase, counted from the timer's construction."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Adds the block's time to `phase`; time in an inner phase counts for that phase only."""
        inner_before, began = sum(self.seconds.values()), time.monotonic()
        try:
            yield
        finally:
            inner = sum(self.seconds.values()) - inner_before
            self.seconds[phase] += time.monotonic() - began - inner

    @contextmanager
    def trace(self, phase: str) -> Iterator[None]:
        """Times the block and records it as a span of the step's trace."""
        with self.time(phase), span(phase):
            yield

    def waiting_for(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yields `items` and counts the time until each of them arrives as waiting."""
        remaining = iter(items)
        while True:
            with self.time("wait"):
                item = next(remaining, None)
            if item is None:
                return
            yield item

    @property
    def total_s(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self._began


@dataclass(frozen=True, slots=True)
class LeaderServices:
    """The services that only rank 0 has; they live in its event loop."""

    publisher: Publisher
    reporter: Reporter
    servicer: PolicyServicer
    tracer: Tracer
    policy_address: str
    """Where the other ranks reach the Policy service."""


@dataclass(kw_only=True)
class TrainingLoop:
    """One rank's training from `step` on. Every rank calls `run` in its training thread."""

    spec: JobSpec
    ranks: Ranks
    engine: DeepSpeedEngine
    learner: Learner
    source: BatchSource
    checkpointer: Checkpointer
    parity: ParityCheck
    share: ServedShare
    offer: Callable[[Offer], None]
    """Takes this rank's share of a new version, in the event loop's thread."""
    export: Callable[[], None]
    events: EventLoopProxy
    leader: LeaderServices | None
    step: int = 0
    """Optimizer steps done, which is the policy version."""
    ledger: batches_pb2.LedgerSnapshot | None = None
    """The preprocessor's ledger after `step` commits; rank 0's only."""
    timer: StepTimer = field(default_factory=StepTimer)

    def __post_init__(self) -> None:
        self._tracer = Tracer() if self.leader is None else self.leader.tracer
        self._saved_step: int | None = self.step if self.ledger is not None else None

    def run(self) -> None:
        """Trains to the last step, the end of the data, or a stop, and leaves a checkpoint; exports
        the model unless it was stopped.

        Consumes batches, produces commits and weight snapshots, waits for the preprocessor and the
        other ranks, and is unblocked by a batch or a stop.
        """
        try:
            self._resume()
            while (batch := self._next_batch()) is not None:
                with self._tracer.root("optimizer step", batch.plan.traceparents, step=self.step):
                    self._train(batch)
        except TrainingStopped:
            log.info("stopped after step %d", self.step)
            self._save_checkpoint()
            return
        self._save_checkpoint()
        self.export()
        log.info("done after step %d", self.step)

    def _train(self, batch: RankBatch) -> None:
        with self.timer.trace("train"):
            trained = self.learner.train(batch, self.timer.waiting_for(self.source.parts(batch)))
        if trained is None:  # the preprocessor replaced the batch: the same step is pulled again
            return
        plan, values = trained
        # Before the commit: a stop during it must not save these weights with an older ledger.
        self.step += 1
        with self.timer.trace("commit"):
            self.ledger = self.source.commit(plan, last=self._is_done)
        if plan.publish_after and not self._is_done:
            with self.timer.trace("publish"):
                self._publish_weights()
        if self._is_checkpoint_due:
            with self.timer.trace("checkpoint"):
                self._save_checkpoint()
        self._report(plan, values)

    def _resume(self) -> None:
        """Puts the preprocessor's ledger at this step and publishes the weights it starts with."""
        if self._is_done:
            return
        self.ledger = self.source.restore(self.step, self.ledger)
        self._publish_weights()
        if self.parity.is_wanted:
            self._wait_until_published()
            self.parity.run(self.engine, self.ranks, self.events, self.step)

    def _next_batch(self) -> RankBatch | None:
        """Returns this rank's part of the next batch; None after the last step and at the end of
        the data. Raises TrainingStopped.
        """
        if self._is_done:
            return None
        self.timer = StepTimer()
        with self.timer.time("wait"):
            return self.source.next_batch(self.step)

    @property
    def _is_done(self) -> bool:
        return self.step >= self.spec.algorithm.steps

    @property
    def _is_checkpoint_due(self) -> bool:
        every = self.spec.trainers.checkpoint.every_steps
        return bool(every) and self.step % every == 0 and not self._is_done

    def _publish_weights(self) -> None:
        """Copies every rank's share of the weights, to be sent beside training, which never waits
        for the generators.
        """
        self.events.call(self.offer, Offer(self.share.snapshot(), self.step))

    def _wait_until_published(self) -> None:
        """Waits until the generators serve the version that training begins with. Raises
        TrainingStopped.
        """
        outcome = Vote.WAIT
        while outcome is not Vote.READY:
            leader = self.leader
            is_served = leader is None or leader.publisher.status.served_version == self.step
            vote = Vote.READY if is_served else Vote.WAIT
            # A vote and not a flag of rank 0: every rank must leave the loop in the same round.
            outcome = self.ranks.vote(Vote.STOP if self.events.is_stopping else vote)
            if outcome is Vote.STOP:
                raise TrainingStopped
            if outcome is Vote.WAIT:
                self.events.pause(PUBLISHED_POLL_S)

    def _save_checkpoint(self) -> None:
        """Writes a checkpoint of this step unless there is one; at step 0 there is nothing to
        save.
        """
        if self._saved_step == self.step or self.step == 0:
            return
        if self.checkpointer.save(self.step, self.ledger):
            self._saved_step = self.step

    def _report(self, plan: StepPlan, values: dict[str, float]) -> None:
        if self.leader is not None:
            timer, failures = self.timer, self.checkpointer.num_failures
            report = StepReport(plan, values, timer.seconds, timer.total_s, failures)
            self.events.call(self.leader.reporter.step_done, self.step, report)
