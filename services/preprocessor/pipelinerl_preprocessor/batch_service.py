"""The Batches service: hands the trainer its steps. Contract in batches.proto."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

from pipelinerl.v1 import batches_pb2 as pb
from pipelinerl_common.codec import micro_batch_to_proto, plan_to_proto
from pipelinerl_common.errors import PermanentError, Refused
from pipelinerl_common.tracing import Span
from pipelinerl_common.types import StepPlan
from pipelinerl_preprocessor.admission_service import MAX_WAIT_S, check_range
from pipelinerl_preprocessor.batch import PackedBatch, RowLayout, StreamingBatch, assemble
from pipelinerl_preprocessor.groups import DropReason, Group, LedgerSnapshot
from pipelinerl_preprocessor.live import LiveLedger
from pipelinerl_preprocessor.preparation import PreparedGroup
from pipelinerl_preprocessor.run_log import TrainedLog

log = logging.getLogger(__name__)

MAX_RANKS = 65536
SNAPSHOT_SCHEMA = 1


class Batches:
    """The Batches service: one batch at a time, kept until its commit. A call that changes the step
    holds `_lock`, since ranks pull the same step concurrently.
    """

    def __init__(self, live: LiveLedger, layout: RowLayout, trained: TrainedLog) -> None:
        self._live = live
        self._layout = layout
        self._trained = trained
        self._lock = asyncio.Lock()
        self._batch: tuple[RowLayout, PackedBatch] | None = None
        self._streaming: StreamingBatch | None = None
        self._unacknowledged: list[str] = []

    async def PullStep(
        self, request: pb.PullStepRequest, context: Any
    ) -> AsyncIterator[pb.PullStepResponse]:
        """Answers with the batch, or at the latest after `wait_s` with the reason to wait.
        Unblocked by `LiveLedger.changed`.
        """
        del context
        _check_pull(request)
        live = self._live
        give_up_at = live.now() + request.wait_s
        while True:
            if live.ledger.state.done:
                yield pb.PullStepResponse(end=pb.EndOfRun())
                return
            pulled = await self._pull(request, replace(self._layout, num_ranks=request.num_ranks))
            if isinstance(pulled, PackedBatch):
                break
            if not await live.batch_changed.wait(give_up_at - live.now()):
                yield pb.PullStepResponse(wait=pb.Wait(reason=pulled))
                return
        yield pb.PullStepResponse(plan=plan_to_proto(pulled.plan))
        for row in pulled.rows[request.rank]:
            yield pb.PullStepResponse(micro_batch=micro_batch_to_proto(row))

    async def CommitStep(
        self, request: pb.CommitStepRequest, context: Any
    ) -> pb.CommitStepResponse:
        """Acknowledges only when the commit is durable; a repeated call finishes what an earlier
        one could not.
        """
        del context
        live, ledger = self._live, self._live.ledger
        async with self._lock:
            trained = ledger.commit(request.step, request.group_ids, last=request.last)
            if trained:
                self._log_trained(request.step, trained)
                self._batch = None
                self._unacknowledged.extend(group.group_id for group in trained)
                live.counters.trained(request.step, trained)
                await live.return_untrained()
            await live.journal.sync()
            await live.release(self._unacknowledged)
            # Not before: a call that is cut short during the release is repeated and finishes it.
            self._unacknowledged = []
        live.changed(leases_ended=request.last)
        return pb.CommitStepResponse()

    async def MarkPublished(
        self, request: pb.MarkPublishedRequest, context: Any
    ) -> pb.MarkPublishedResponse:
        del context
        live = self._live
        cancelled = live.ledger.publish(request.policy_version)
        await live.given_up(cancelled, DropReason.CANCELLED)
        await live.journal.sync()
        live.changed(leases_ended=True)
        return pb.MarkPublishedResponse()

    async def WaitPublishable(
        self, request: pb.WaitPublishableRequest, context: Any
    ) -> pb.WaitPublishableResponse:
        del context
        check_range("wait_s", request.wait_s, MAX_WAIT_S)
        live = self._live
        live.ledger.check_restored()
        give_up_at = live.now() + request.wait_s
        while not (allowed := live.gate.may_publish(request.policy_version)):
            if not await live.batch_changed.wait(give_up_at - live.now()):
                break
        # A pull may have waited for this version to go.
        live.changed()
        return pb.WaitPublishableResponse(allowed=allowed)

    async def GetSnapshot(
        self, request: pb.GetSnapshotRequest, context: Any
    ) -> pb.GetSnapshotResponse:
        del context
        snapshot = self._live.ledger.snapshot()
        if request.step != snapshot.num_committed_steps:
            raise Refused(
                f"GetSnapshot: {snapshot.num_committed_steps} steps are committed, not "
                f"{request.step}"
            )
        return pb.GetSnapshotResponse(
            snapshot=pb.LedgerSnapshot(
                schema_version=SNAPSHOT_SCHEMA,
                num_committed_steps=snapshot.num_committed_steps,
                next_prompt_index=snapshot.next_prompt_index,
                open_prompt_indices=snapshot.open_prompt_indices,
                incarnation=snapshot.incarnation,
            )
        )

    async def Restore(self, request: pb.RestoreRequest, context: Any) -> pb.RestoreResponse:
        del context
        live, ledger = self._live, self._live.ledger
        snapshot = _snapshot_of(request.snapshot) if request.HasField("snapshot") else None
        async with self._lock:
            void = ledger.restore(request.restore_id, request.num_committed_steps, snapshot)
            rewound = ledger.state.rewound
            if not ledger.batch:
                self._batch = None
            ended = [group_id for group_id in live.received if ledger.groups.get(group_id) is None]
            await live.given_up(ended, DropReason.ROLLBACK)
            if rewound:
                live.gate.rewind()
                self._trained.rewind(ledger.state.num_committed)
            await live.journal.sync()
        log.info(
            "restored step=%d incarnation=%d rewound=%s void=%d",
            request.num_committed_steps,
            ledger.state.incarnation,
            rewound,
            len(void),
        )
        live.changed(leases_ended=True)
        return pb.RestoreResponse(rewound=rewound)

    async def _pull(self, request: pb.PullStepRequest, layout: RowLayout) -> PackedBatch | str:
        """The batch, or the new rows of a streaming one, or the reason to wait. Raises Unavailable
        and Refused.
        """
        step = request.step
        async with self._lock:
            ledger = self._live.ledger
            ledger.check_restored()
            current = ledger.state.num_committed
            if step == current + 1:
                return f"step {current} is not committed yet"
            if step != current:
                raise Refused(
                    f"PullStep: step {step} is neither the current one, {current}, nor the next"
                )
            if not ledger.batch and self._live.gate.holds_back():
                return f"the weights of version {step} are held back by the policy"
            if ledger.policy.streams:
                return await self._stream(request, layout)
            return await self._whole(step, layout)

    async def _whole(self, step: int, layout: RowLayout) -> PackedBatch | str:
        """The batch of the ledger's groups, which are taken first unless a pull has taken them."""
        live, ledger = self._live, self._live.ledger
        if self._batch is not None and self._batch[0] == layout:
            return self._batch[1]
        if not ledger.batch:
            take = ledger.take()
            await live.given_up(take.dropped, DropReason.STALE)
            if not take.groups:
                return take.wait_reason
        groups = [live.prepared[group_id] for group_id in ledger.batch]
        for group in groups:
            live.waiting.discard(group.group_id)
        with ExitStack() as packing:
            traced = [
                packing.enter_context(self._packing(step, group))
                for group in groups
                if group.traceparent
            ]
            # In a thread, because packing takes a while and leases must be answered meanwhile.
            batch = await asyncio.to_thread(
                assemble,
                step,
                groups,
                layout,
                publish_after=ledger.policy.publishes_after(step),
                traceparents=tuple(span.traceparent for span in traced),
            )
        _log_packed(batch.plan)
        self._batch = (layout, batch)
        return batch

    async def _stream(self, request: pb.PullStepRequest, layout: RowLayout) -> PackedBatch | str:
        """Takes groups until there is a row that the caller does not have."""
        live, ledger, policy = self._live, self._live.ledger, self._live.ledger.policy
        batch, current = self._streaming, (request.step, layout, ledger.batch)
        # After a restart, a rewind or a change of layout the batch is assembled again.
        if batch is None or (batch.step, batch.layout, batch.group_ids) != current:
            batch = self._streaming = StreamingBatch(
                request.step,
                layout,
                policy.groups_per_step,
                publish_after=policy.publishes_after(request.step),
            )
            for group_id in ledger.batch:
                self._add(batch, group_id)
        num_had = request.first_micro_batch if request.batch_id == batch.batch_id else 0
        while batch.num_rows <= num_had and not batch.is_complete:
            take = ledger.take_next()
            for taken in take.groups:
                self._add(batch, taken)
            await live.given_up(take.dropped, DropReason.STALE)
            if not take.groups:
                return take.wait_reason
        return batch.after(num_had)

    def _add(self, batch: StreamingBatch, group_id: str) -> None:
        self._live.waiting.discard(group_id)
        group = self._live.prepared[group_id]
        with self._packing(batch.step, group) as packing:
            batch.add(group, packing.traceparent)
        if batch.is_complete:
            _log_packed(batch.after(batch.num_rows).plan)

    def _packing(self, step: int, group: PreparedGroup) -> AbstractContextManager[Span]:
        return self._live.tracer.continued(
            "pack", group.traceparent, group=group.group_id, step=step
        )

    def _log_trained(self, step: int, trained: list[Group]) -> None:
        # Before the journal has the commit: the next start removes a line that a crash leaves
        # without its commit.
        try:
            self._trained.append(step, self._live.ledger.state.incarnation, trained)
        except OSError as error:
            log.error("step=%d could not be written to %s: %s", step, self._trained.path, error)


def _log_packed(plan: StepPlan) -> None:
    log.info(
        "step=%d groups=%d sequences=%d tokens=%d micro_batches=%d fill=%.3f",
        plan.step,
        len(plan.group_ids),
        plan.num_sequences,
        plan.num_trained_tokens,
        plan.num_micro_batches,
        plan.metrics["packing_fill"],
    )


def _check_pull(request: pb.PullStepRequest) -> None:
    if not 1 <= request.num_ranks <= MAX_RANKS:
        raise PermanentError(f"num_ranks={request.num_ranks} must be between 1 and {MAX_RANKS}")
    if request.rank >= request.num_ranks:
        raise PermanentError(f"rank={request.rank} must be below num_ranks={request.num_ranks}")
    if request.step < 0:
        raise PermanentError(f"step={request.step} must not be negative")
    check_range("wait_s", request.wait_s, MAX_WAIT_S)


def _snapshot_of(message: pb.LedgerSnapshot) -> LedgerSnapshot:
    if message.schema_version != SNAPSHOT_SCHEMA:
        raise PermanentError(
            f"snapshot.schema_version={message.schema_version}: this release reads "
            f"{SNAPSHOT_SCHEMA}"
        )
    open_prompts = tuple(message.open_prompt_indices)
    if message.num_committed_steps < 0 or any(
        prompt >= message.next_prompt_index for prompt in open_prompts
    ):
        raise PermanentError(
            f"snapshot of step {message.num_committed_steps}: open prompts {open_prompts[:8]} must "
            f"be below next_prompt_index={message.next_prompt_index}"
        )
    return LedgerSnapshot(
        message.num_committed_steps, message.next_prompt_index, open_prompts, message.incarnation
    )
