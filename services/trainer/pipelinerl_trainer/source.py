"""Where batches come from, for all ranks together: each rank pulls its own part, and they agree
before they train.

Every wait is a round of some seconds, and every rank takes part in every round, so that no rank
waits for another much longer than that, a stop is heard in any wait, and a preprocessor that is
away is simply another round.
"""

import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from pipelinerl.v1 import batches_pb2
from pipelinerl_common.errors import FatalError, PermanentError, Refused, TemporaryError
from pipelinerl_common.types import StepPlan
from pipelinerl_trainer.batch_client import CALL_S, TRANSFER_S, WAIT_S, BatchClient
from pipelinerl_trainer.event_loop import EventLoopProxy
from pipelinerl_trainer.learner import BatchReplaced, RankBatch
from pipelinerl_trainer.ranks import Ranks, Vote

log = logging.getLogger(__name__)

MARGIN_S = 5.0
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.2, 5.0
REFUSED_FOR_S = 60.0
"""A preprocessor that refuses for this long has another ledger than the trainer: only a restart
from a checkpoint helps.
"""
REPORT_EVERY_S = 30.0


Result = TypeVar("Result")


class TrainingStopped(Exception):
    """The process was asked to stop while the ranks waited."""


class BatchSource:
    """Used in the training thread, by every rank in the same order."""

    def __init__(self, client: BatchClient, bridge: EventLoopProxy, ranks: Ranks) -> None:
        self._client = client
        self._bridge = bridge
        self._ranks = ranks
        self._backoff_s = FIRST_BACKOFF_S
        self._refused_since: float | None = None
        self._refusal = "the preprocessor refuses another rank, whose log has the reason"
        self._reported_at = time.monotonic()

    def restore(
        self, num_committed_steps: int, snapshot: batches_pb2.LedgerSnapshot | None
    ) -> batches_pb2.LedgerSnapshot | None:
        """Puts the ledger where the trainer is; the leader's ledger afterwards, nothing on other
        ranks.

        Raises Stopped or FatalError.
        """
        restore_id = uuid.uuid4().hex

        async def restore() -> batches_pb2.LedgerSnapshot:
            rewound = await self._client.restore(restore_id, num_committed_steps, snapshot)
            log.info("restored_ledger step=%d rewound=%s", num_committed_steps, rewound)
            return await self._client.snapshot(num_committed_steps)

        return self._leader_until_done(restore, "to restore the ledger")

    def next_batch(self, step: int) -> RankBatch | None:
        """This rank's part of the batch of `step`, the same batch on all ranks. None at the end of
        the run. Raises Stopped.
        """
        while True:
            vote, batch = self._pull(step)
            outcome = self._ranks.vote(vote, _identity(batch))
            if outcome is Vote.READY:
                self._calm()
                return batch
            if outcome is Vote.DONE:
                return None
            self._raise_on(outcome)
            if vote is Vote.READY:
                self._back_off("other ranks do not have this batch yet")

    def parts(self, first: RankBatch) -> Iterator[RankBatch]:
        """The batch that `first` begins, as it comes: the same number of rows on every rank in each
        part, and the final plan with the last. Raises BatchReplaced, Stopped or FatalError, on
        every rank alike.
        """
        plan, rows, num_given = first.plan, first.micro_batches, 0
        while True:
            num_ready = int(
                self._ranks.gather([float(len(rows))]).min()
            )  # ranks may have heard of more or fewer rows
            num_given += num_ready
            yield RankBatch(plan, rows[:num_ready])
            rows = rows[num_ready:]
            if num_given == plan.num_micro_batches and not plan.provisional:
                return
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
            self._calm()

    def commit(self, plan: StepPlan, *, last: bool) -> batches_pb2.LedgerSnapshot | None:
        """Tells the preprocessor that the step is done; the leader's ledger afterwards, nothing on
        other ranks.

        Raises Stopped, after which the step may be committed or not, or FatalError.
        """

        async def commit() -> batches_pb2.LedgerSnapshot:
            await self._client.commit(plan, last=last)
            return await self._client.snapshot(plan.step + 1)

        return self._leader_until_done(commit, f"to commit step {plan.step}")

    def _pull(
        self, step: int, batch_id: str = "", num_had: int = 0
    ) -> tuple[Vote, RankBatch | None]:
        if self._bridge.is_stopping:
            return Vote.STOP, None
        try:
            pulled = self._bridge.wait(
                self._client.pull(step, batch_id, num_had), WAIT_S + TRANSFER_S + MARGIN_S
            )
        except (TemporaryError, PermanentError) as error:
            return self._excuse(error, f"for step {step}"), None
        if pulled.batch is not None:
            return Vote.READY, pulled.batch
        self._calm()
        if pulled.is_end:
            return Vote.DONE, None
        self._report(f"waiting for step {step}: {pulled.wait_reason}")
        return Vote.WAIT, None

    def _leader_until_done(
        self, attempt: Callable[[], Coroutine[Any, Any, Result]], purpose: str
    ) -> Result | None:
        """The leader tries two calls until they succeed, and has their result; the others follow in
        rounds.
        """
        while True:
            vote, result = (
                self._try(attempt, purpose) if self._ranks.is_leader else (Vote.READY, None)
            )
            outcome = self._ranks.vote(vote)
            if outcome is Vote.READY:
                self._calm()
                return result
            self._raise_on(outcome)

    def _try(
        self, attempt: Callable[[], Coroutine[Any, Any, Result]], purpose: str
    ) -> tuple[Vote, Result | None]:
        try:
            return Vote.READY, self._bridge.wait(attempt(), 2 * CALL_S + MARGIN_S)
        except (TemporaryError, PermanentError) as error:
            return Vote.STOP if self._bridge.is_stopping else self._excuse(error, purpose), None

    def _excuse(self, error: Exception, purpose: str) -> Vote:
        """Whether a failed call is worth another round; waits a little if so."""
        if isinstance(error, PermanentError):
            self._refused_since = self._refused_since or time.monotonic()
            if (
                not isinstance(error, Refused)
                or time.monotonic() - self._refused_since > REFUSED_FOR_S
            ):
                self._refusal = f"the preprocessor refuses {purpose}: {error}"
                if isinstance(error, Refused):
                    self._refusal += "; its ledger and the trainer do not fit together: restart the trainer with --resume"
                return Vote.FAILED
        self._back_off(f"trying again {purpose}: {error}")
        return Vote.WAIT

    def _raise_on(self, outcome: Vote) -> None:
        if outcome is Vote.STOP:
            raise TrainingStopped
        if outcome is Vote.FAILED:
            raise FatalError(self._refusal)

    def _back_off(self, reason: str) -> None:
        self._report(reason)
        self._bridge.pause(self._backoff_s)
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)

    def _calm(self) -> None:
        self._backoff_s, self._refused_since = FIRST_BACKOFF_S, None

    def _report(self, reason: str) -> None:
        now = time.monotonic()
        if now - self._reported_at > REPORT_EVERY_S:
            self._reported_at = now
            log.info("%s", reason)


def _identity(batch: RankBatch | None) -> str:
    """What ranks must have in common to train together: one that grows is trained in parts, by all
    ranks or by none.
    """
    return "" if batch is None else f"{batch.plan.batch_id} {batch.plan.provisional}"
