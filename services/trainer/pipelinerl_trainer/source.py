"""Where batches come from, for all ranks together: each rank pulls its own part, and the ranks
agree before they train.

Every wait is a round of some seconds in which every rank takes part. So no rank waits for another
much longer than a round, a stop ends any wait, and an unreachable preprocessor costs more rounds
and nothing else.
"""

import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from pipelinerl.v1 import batches_pb2
from pipelinerl_common.backoff import Backoff
from pipelinerl_common.errors import FatalError, PermanentError, Refused, TemporaryError
from pipelinerl_common.types import MicroBatch, StepPlan
from pipelinerl_trainer.batch_client import CALL_S, TRANSFER_S, WAIT_S, BatchClient
from pipelinerl_trainer.event_loop import EventLoopProxy
from pipelinerl_trainer.learner import BatchReplaced, RankBatch
from pipelinerl_trainer.ranks import Ranks, Vote

log = logging.getLogger(__name__)

MARGIN_S = 5.0
REFUSED_FOR_S = 60.0
"""A preprocessor that refuses for this long has another ledger than the trainer, and only a restart
from a checkpoint helps.
"""
REPORT_EVERY_S = 30.0


Result = TypeVar("Result")


class TrainingStopped(Exception):
    """The process was asked to stop while the ranks waited."""


class BatchSource:
    """Pulls and commits batches in the training thread. Every rank calls it in the same order."""

    def __init__(self, client: BatchClient, events: EventLoopProxy, ranks: Ranks) -> None:
        self._client = client
        self._events = events
        self._ranks = ranks
        self._backoff = Backoff()
        self._refused_since: float | None = None
        self._refusal = "the preprocessor refuses another rank, whose log has the reason"
        self._reported_at = time.monotonic()

    def restore(
        self, num_committed_steps: int, snapshot: batches_pb2.LedgerSnapshot | None
    ) -> batches_pb2.LedgerSnapshot | None:
        """Puts the preprocessor's ledger at the trainer's step. Returns the ledger on the leader
        and None on other ranks. Raises TrainingStopped or FatalError.
        """
        # One id for all attempts: a retry after a lost answer must not rewind the ledger again.
        restore_id = uuid.uuid4().hex

        async def restore() -> batches_pb2.LedgerSnapshot:
            rewound = await self._client.restore(restore_id, num_committed_steps, snapshot)
            log.info("restored_ledger step=%d rewound=%s", num_committed_steps, rewound)
            return await self._client.snapshot(num_committed_steps)

        return self._retry_on_leader(restore, "to restore the ledger")

    def next_batch(self, step: int) -> RankBatch | None:
        """Returns this rank's part of the batch of `step`, the same batch on all ranks; None at the
        end of the run. Waits for the preprocessor; raises TrainingStopped.
        """
        while True:
            vote, batch = self._pull(step)
            outcome = self._ranks.vote(vote, _identity(batch))
            if outcome is Vote.READY:
                self._clear_failures()
                return batch
            if outcome is Vote.DONE:
                return None
            self._raise_on(outcome)
            # Its own batch is answered at once each time: without a pause this rank would spin.
            if vote is Vote.READY:
                self._wait_before_retry("other ranks do not have this batch yet")

    def parts(self, first: RankBatch) -> Iterator[RankBatch]:
        """Yields the batch that `first` begins as it grows: in each part the same number of rows on
        every rank, and with the last part the final plan. A batch that is whole is one part.

        Raises BatchReplaced, TrainingStopped or FatalError, on every rank alike.
        """
        if not first.plan.provisional:
            yield first
            return
        plan, rows, num_given = first.plan, first.micro_batches, 0
        while True:
            # Ranks may have received different numbers of rows, and every row is a collective.
            num_ready = int(self._ranks.gather([float(len(rows))]).min())
            num_given += num_ready
            yield RankBatch(plan, rows[:num_ready])
            rows = rows[num_ready:]
            if num_given == plan.num_micro_batches and not plan.provisional:
                return
            plan, rows = self._more_rows(plan, rows, num_given)

    def _more_rows(
        self, plan: StepPlan, rows: tuple[MicroBatch, ...], num_given: int
    ) -> tuple[StepPlan, tuple[MicroBatch, ...]]:
        """Returns the newest plan and at least one row on every rank; a rank that has rows waits
        for the others.
        """
        outcome = Vote.WAIT
        while outcome is not Vote.READY:
            vote = Vote.READY
            if not rows:
                vote, pulled = self._pull(plan.step, plan.batch_id, num_given)
                if pulled is not None and pulled.plan.batch_id == plan.batch_id:
                    plan, rows = pulled.plan, pulled.micro_batches
                elif pulled is not None:
                    vote = Vote.AGAIN
            outcome = self._ranks.vote(vote, plan.batch_id)
            self._raise_on(outcome)
            if outcome in (Vote.AGAIN, Vote.DONE):
                raise BatchReplaced(plan.batch_id)
        self._clear_failures()
        return plan, rows

    def commit(self, plan: StepPlan, *, last: bool) -> batches_pb2.LedgerSnapshot | None:
        """Reports to the preprocessor that the step is done. Returns the ledger on the leader and
        None on other ranks.

        Raises TrainingStopped, after which the step may be committed or not, or FatalError.
        """

        async def commit() -> batches_pb2.LedgerSnapshot:
            await self._client.commit(plan, last=last)
            return await self._client.snapshot(plan.step + 1)

        return self._retry_on_leader(commit, f"to commit step {plan.step}")

    def _pull(
        self, step: int, batch_id: str = "", num_had: int = 0
    ) -> tuple[Vote, RankBatch | None]:
        if self._events.is_stopping:
            return Vote.STOP, None
        try:
            pulled = self._events.wait(
                self._client.pull(step, batch_id, num_had), WAIT_S + TRANSFER_S + MARGIN_S
            )
        except (TemporaryError, PermanentError) as error:
            return self._vote_on_failure(error, f"for step {step}"), None
        if pulled.batch is not None:
            return Vote.READY, pulled.batch
        self._clear_failures()
        if pulled.is_end:
            return Vote.DONE, None
        self._report(f"waiting for step {step}: {pulled.wait_reason}")
        return Vote.WAIT, None

    def _retry_on_leader(
        self, attempt: Callable[[], Coroutine[Any, Any, Result]], purpose: str
    ) -> Result | None:
        """Lets the leader attempt its two calls until they succeed, and returns their result there;
        the other ranks vote along.
        """
        while True:
            vote, result = Vote.READY, None
            if self._ranks.is_leader:
                try:
                    result = self._events.wait(attempt(), 2 * CALL_S + MARGIN_S)
                except (TemporaryError, PermanentError) as error:
                    stopping = self._events.is_stopping
                    vote = Vote.STOP if stopping else self._vote_on_failure(error, purpose)
            outcome = self._ranks.vote(vote)
            if outcome is Vote.READY:
                self._clear_failures()
                return result
            self._raise_on(outcome)

    def _vote_on_failure(self, error: Exception, purpose: str) -> Vote:
        """Returns WAIT, after a pause, for a failure that may pass, and FAILED for any other."""
        if isinstance(error, PermanentError):
            # A restarted preprocessor refuses until it is restored: only a lasting refusal counts.
            self._refused_since = self._refused_since or time.monotonic()
            is_refused = isinstance(error, Refused)
            if not is_refused or time.monotonic() - self._refused_since > REFUSED_FOR_S:
                self._refusal = f"the preprocessor refuses {purpose}: {error}" + (
                    "; its ledger and the trainer do not match: restart the trainer with --resume"
                    if is_refused
                    else ""
                )
                return Vote.FAILED
        self._wait_before_retry(f"trying again {purpose}: {error}")
        return Vote.WAIT

    def _raise_on(self, outcome: Vote) -> None:
        if outcome is Vote.STOP:
            raise TrainingStopped
        if outcome is Vote.FAILED:
            raise FatalError(self._refusal)

    def _wait_before_retry(self, reason: str) -> None:
        self._report(reason)
        self._events.pause(self._backoff.next_delay())

    def _clear_failures(self) -> None:
        self._backoff.reset()
        self._refused_since = None

    def _report(self, reason: str) -> None:
        now = time.monotonic()
        if now - self._reported_at > REPORT_EVERY_S:
            self._reported_at = now
            log.info("%s", reason)


def _identity(batch: RankBatch | None) -> str:
    """Returns what ranks must have in common to train together. A growing batch is trained in
    parts, by all ranks or by none.
    """
    return "" if batch is None else f"{batch.plan.batch_id} {batch.plan.provisional}"
