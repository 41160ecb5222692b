"""Where one step's time goes.

The training loop.

    every rank                                   rank 0 beside it, in the event loop
    ----------                                   -----------------------------------
    pull the batch of step k          <------    preprocessor (assembles it at this moment)
    forward, backward, all micro-batches
    optimizer step
    commit step k                     ------>    preprocessor (acknowledges the samples)
    snapshot of version k+1           ------>    publisher -> coordinator, generators -> MarkPublished
    checkpoint, when due
    report                            ------>    log, metrics stream

Weights of version k have seen k optimizer steps; step k (from 0) is trained at version k and makes
version k+1. A step that was skipped because its gradient was not finite makes a version too, with
the same weights: its samples are used up.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from pipelinerl.v1 import batches_pb2
from pipelinerl_common.metrics.catalog import PHASES
from pipelinerl_common.settings import JobSpec
from pipelinerl_common.tracing import Tracer, span
from pipelinerl_common.types import StepPlan
from pipelinerl_trainer.checkpoint import Checkpointer
from pipelinerl_trainer.engine import DeepSpeedEngine
from pipelinerl_trainer.event_loop import EventLoopProxy
from pipelinerl_trainer.learner import BatchReplaced, Learner, RankBatch
from pipelinerl_trainer.membership import PolicyServicer
from pipelinerl_trainer.parity import ParityCheck
from pipelinerl_trainer.publisher import Offer, Publisher
from pipelinerl_trainer.ranks import Ranks, Vote
from pipelinerl_trainer.report import Reporter, StepReport
from pipelinerl_trainer.source import BatchSource, TrainingStopped
from pipelinerl_weights.manifest import Manifest
from pipelinerl_weights.transfer import WeightSnapshot

Part = TypeVar("Part")


class StepTimer:
    """Seconds of one step by phase, from the moment it is made."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Adds the block's time to `phase`; what it spends in an inner phase counts there only."""
        inner_before, began = sum(self.seconds.values()), time.monotonic()
        try:
            yield
        finally:
            inner = sum(self.seconds.values()) - inner_before
            self.seconds[phase] += time.monotonic() - began - inner

    def waiting_for(self, parts: Iterable[Part]) -> Iterator[Part]:
        """`parts`, each wait for the next of which counts as waiting."""
        remaining = iter(parts)
        while True:
            with self.of("wait"):
                part = next(remaining, None)
            if part is None:
                return
            yield part

    @property
    def total_s(self) -> float:
        """Since the step began."""
        return time.monotonic() - self._began


log = logging.getLogger(__name__)

PUBLISHED_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class LeaderServices:
    """What only rank 0 has, in its event loop."""

    publisher: Publisher
    reporter: Reporter
    servicer: PolicyServicer
    tracer: Tracer


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything the loop is made of."""

    spec: JobSpec
    ranks: Ranks
    engine: DeepSpeedEngine
    learner: Learner
    source: BatchSource
    bridge: EventLoopProxy
    checkpointer: Checkpointer
    parity: ParityCheck
    manifest: Manifest
    export: Callable[[], None]
    desk: LeaderServices | None


class TrainingLoop:
    """One run, from `step` on. `run` is called in the training thread of every rank."""

    def __init__(self, parts: Parts, step: int, ledger: batches_pb2.LedgerSnapshot | None) -> None:
        self._parts = parts
        self._ledger = ledger
        self._tracer = Tracer() if parts.desk is None else parts.desk.tracer
        self._saved_step: int | None = step if ledger is not None else None
        self.step = step
        """Optimizer steps done, which is the policy version."""

    def run(self) -> None:
        """Trains to the last step, the end of the run, or a stop; leaves a checkpoint, and at the
        end the exported model.
        """
        try:
            self._start()
            while self.step < self._parts.spec.algorithm.steps:
                phases = StepTimer()
                with phases.of("wait"):
                    batch = self._parts.source.next_batch(self.step)
                if batch is None:
                    break
                with self._tracer.root("optimizer step", batch.plan.traceparents, step=self.step):
                    self._train(batch, phases)
        except TrainingStopped:
            log.info("stopped after step %d", self.step)
            self._save()
            return
        self._save()
        self._parts.export()
        log.info("done after step %d", self.step)

    def _start(self) -> None:
        if self.step < self._parts.spec.algorithm.steps:
            self._ledger = self._parts.source.restore(self.step, self._ledger)
            self._publish()
            if self._parts.parity.is_wanted:
                self._wait_published()
                self._parts.parity.run(
                    self._parts.engine, self._parts.ranks, self._parts.bridge, self.step
                )

    def _train(self, batch: RankBatch, phases: StepTimer) -> None:
        """One step. A batch that was replaced half-way is left untrained, and the step not counted."""
        parts = self._parts.source.parts(batch) if batch.plan.provisional else (batch,)
        try:
            with phases.of("train"), span("train"):
                plan, values = self._parts.learner.train_parts(phases.waiting_for(parts))
        except BatchReplaced as error:
            log.warning("step=%d batch=%s was replaced, training begins it again", self.step, error)
            return
        # before the commit: a stop during it must not save these weights with an older ledger
        self.step += 1
        is_last = self.step == self._parts.spec.algorithm.steps
        with phases.of("commit"), span("commit"):
            self._ledger = self._parts.source.commit(plan, last=is_last)
        if plan.publish_after and not is_last:
            with phases.of("publish"), span("publish"):
                self._publish()
        every = self._parts.spec.trainers.checkpoint.every_steps
        if every and self.step % every == 0 and not is_last:
            with phases.of("checkpoint"), span("checkpoint"):
                self._save()
        self._report(plan, values, phases)

    def _publish(self) -> None:
        """Every rank gathers; rank 0 packs and hands over, and nobody waits for the generators."""
        weights = self._parts.engine.served_weights()
        desk = self._parts.desk
        if desk is None:
            for _ in weights:
                pass
            return
        on_host = self._parts.spec.weight_transfer.backend == "gloo"
        snapshot = WeightSnapshot.pack(
            self._parts.manifest, weights, device="cpu" if on_host else self._parts.ranks.device
        )
        self._parts.bridge.call(desk.publisher.offer, Offer(snapshot, self.step))

    def _wait_published(self) -> None:
        """Until the generators serve the version that training begins with. Raises Stopped."""
        desk, bridge = self._parts.desk, self._parts.bridge
        while True:
            is_served = desk is None or desk.publisher.status.served_version == self.step
            vote = Vote.READY if is_served else Vote.WAIT
            outcome = self._parts.ranks.vote(Vote.STOP if bridge.is_stopping else vote)
            if outcome is Vote.STOP:
                raise TrainingStopped
            if outcome is Vote.READY:
                return
            bridge.pause(PUBLISHED_POLL_S)

    def _save(self) -> None:
        if (
            self._saved_step != self.step
            and self.step > 0
            and self._parts.checkpointer.save(self.step, self._ledger)
        ):
            self._saved_step = self.step

    def _report(self, plan: StepPlan, values: dict[str, float], phases: StepTimer) -> None:
        desk = self._parts.desk
        if desk is not None:
            failures = self._parts.checkpointer.num_failures
            report = StepReport(plan, values, phases.seconds, phases.total_s, failures)
            self._parts.bridge.call(desk.reporter.step_done, self.step, report)
