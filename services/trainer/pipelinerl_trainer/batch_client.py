"""The client of the preprocessor's `Batches` service: every call has a deadline, every answer is
checked.
"""

from dataclasses import dataclass

from pipelinerl.v1 import batches_pb2, batches_pb2_grpc
from pipelinerl_common import rpc
from pipelinerl_common.codec import micro_batch_from_proto, plan_from_proto
from pipelinerl_common.errors import MalformedMessage
from pipelinerl_common.types import MicroBatch, StepPlan
from pipelinerl_trainer.learner import RankBatch

WAIT_S = 5.0
"""Longest time that the preprocessor may hold a pull until the batch is ready."""
TRANSFER_S = 60.0
"""Longest time for a batch to arrive."""
CALL_S = 10.0


@dataclass(frozen=True, slots=True)
class Pulled:
    """The answer to a pull: a batch, or the reason to wait, or neither at the end of the run."""

    batch: RankBatch | None = None
    wait_reason: str | None = None

    @property
    def is_end(self) -> bool:
        return self.batch is None and self.wait_reason is None


class BatchClient:
    """Calls `Batches` as data rank `rank` of `num_ranks`; ranks that share rows pull the same ones.

    All methods raise Unavailable, Refused or PermanentError as `rpc.call` does.
    """

    def __init__(self, channel: rpc.Channel, rank: int, num_ranks: int) -> None:
        self._stub = batches_pb2_grpc.BatchesStub(channel)
        self._rank = rank
        self._num_ranks = num_ranks

    async def pull(self, step: int, batch_id: str = "", num_had: int = 0) -> Pulled:
        """Returns the batch of `step` as soon as it is ready, within `WAIT_S`. Of a growing batch
        whose first `num_had` rows were received under `batch_id` it returns the rows after those.
        Raises MalformedMessage for a broken answer.
        """
        request = batches_pb2.PullStepRequest(
            step=step,
            rank=self._rank,
            num_ranks=self._num_ranks,
            wait_s=WAIT_S,
            batch_id=batch_id,
            first_micro_batch=num_had,
        )
        plan: StepPlan | None = None
        micro_batches: list[MicroBatch] = []
        async for response in rpc.stream_call(
            self._stub.PullStep, request, timeout_s=WAIT_S + TRANSFER_S
        ):
            kind = response.WhichOneof("body")
            if kind == "wait":
                return Pulled(wait_reason=response.wait.reason or "no reason given")
            if kind == "end":
                return Pulled()
            if kind == "plan":
                plan = plan_from_proto(response.plan)
            elif kind == "micro_batch":
                micro_batches.append(micro_batch_from_proto(response.micro_batch))
        return Pulled(batch=_checked(step, plan, micro_batches, batch_id, num_had))

    async def commit(self, plan: StepPlan, *, last: bool) -> None:
        request = batches_pb2.CommitStepRequest(
            step=plan.step, batch_id=plan.batch_id, group_ids=plan.group_ids, last=last
        )
        await rpc.call(self._stub.CommitStep, request, timeout_s=CALL_S)

    async def mark_published(self, version: int) -> None:
        await rpc.call(
            self._stub.MarkPublished,
            batches_pb2.MarkPublishedRequest(policy_version=version),
            timeout_s=CALL_S,
        )

    async def may_publish(self, version: int) -> bool:
        """Returns whether the staleness policy lets `version` go to the generators; waits up to
        `WAIT_S` for it.
        """
        request = batches_pb2.WaitPublishableRequest(policy_version=version, wait_s=WAIT_S)
        response = await rpc.call(self._stub.WaitPublishable, request, timeout_s=WAIT_S + CALL_S)
        return bool(response.allowed)

    async def snapshot(self, num_committed_steps: int) -> batches_pb2.LedgerSnapshot:
        """Returns the ledger after `num_committed_steps` commits."""
        request = batches_pb2.GetSnapshotRequest(step=num_committed_steps)
        response = await rpc.call(self._stub.GetSnapshot, request, timeout_s=CALL_S)
        return response.snapshot

    async def restore(
        self, restore_id: str, num_committed_steps: int, snapshot: batches_pb2.LedgerSnapshot | None
    ) -> bool:
        """Rewinds the ledger, or starts a fresh one without a snapshot. Returns whether it was at
        another step before.
        """
        request = batches_pb2.RestoreRequest(
            restore_id=restore_id, num_committed_steps=num_committed_steps, snapshot=snapshot
        )
        response = await rpc.call(self._stub.Restore, request, timeout_s=CALL_S)
        return bool(response.rewound)


def _checked(
    step: int,
    plan: StepPlan | None,
    micro_batches: list[MicroBatch],
    batch_id: str = "",
    num_had: int = 0,
) -> RankBatch:
    if plan is None:
        raise MalformedMessage(f"PullStep({step}) sent no plan")
    if plan.step != step:
        raise MalformedMessage(f"PullStep({step}) sent the plan of step {plan.step}")
    expected = plan.num_micro_batches - (num_had if plan.batch_id == batch_id else 0)
    if len(micro_batches) != expected or not micro_batches:
        raise MalformedMessage(
            f"PullStep({step}) sent {len(micro_batches)} micro-batches; the plan has {expected}, "
            "and at least 1 must come"
        )
    return RankBatch(plan, tuple(micro_batches))
