"""Conversion of packed micro-batches and step plans on gRPC: see batches.proto."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelinerl.v1 import batches_pb2
from pipelinerl_common.codec.columns import (
    FLOAT32,
    UINT8,
    UINT32,
    runs_from_proto,
    runs_to_proto,
    sized,
    to_bytes,
)
from pipelinerl_common.errors import MalformedMessage
from pipelinerl_common.types import GroupId, MicroBatch, StepPlan


def _check(condition: bool, reason: str, message: str) -> None:
    if not condition:
        raise MalformedMessage(message, reason)


def micro_batch_to_proto(batch: MicroBatch) -> batches_pb2.MicroBatch:
    """Raises ValueError when a column has another length than `input_ids_L`."""
    columns: list[NDArray[Any] | None] = [
        batch.loss_mask_L,
        batch.old_logprobs_L,
        batch.advantages_L,
    ]
    for column in (*columns, batch.ref_logprobs_L, batch.returns_L):
        if column is not None and len(column) != batch.num_slots:
            raise ValueError(
                f"micro-batch {batch.index}: a column of {len(column)} items beside "
                f"{batch.num_slots} slots"
            )
    return batches_pb2.MicroBatch(
        index=batch.index,
        num_slots=batch.num_slots,
        sequence_lengths=batch.sequence_lengths,
        input_ids=to_bytes(batch.input_ids_L, UINT32),
        loss_mask=to_bytes(batch.loss_mask_L, UINT8),
        old_logprobs=to_bytes(batch.old_logprobs_L, FLOAT32),
        ref_logprobs=b""
        if batch.ref_logprobs_L is None
        else to_bytes(batch.ref_logprobs_L, FLOAT32),
        advantages=to_bytes(batch.advantages_L, FLOAT32),
        returns=b"" if batch.returns_L is None else to_bytes(batch.returns_L, FLOAT32),
        rewards=batch.rewards,
        sequence_weights=batch.sequence_weights,
        version_runs=runs_to_proto(batch.version_runs),
        temperature=batch.temperature,
        group_numbers=batch.group_numbers,
    )


def micro_batch_from_proto(message: batches_pb2.MicroBatch) -> MicroBatch:
    """Returns columns that are read-only views of the message's bytes. Raises MalformedMessage."""
    name, num_slots = f"micro-batch {message.index}", message.num_slots
    sequence_lengths = tuple(message.sequence_lengths)
    _check(all(sequence_lengths), "sequence_lengths", f"{name}: a sequence without tokens")
    used = sum(sequence_lengths)
    _check(
        used <= num_slots,
        "sequence_lengths",
        f"{name}: sequences of {used} tokens in {num_slots} slots",
    )

    def floats(data: bytes, column: str) -> NDArray[np.float32]:
        return sized(data, FLOAT32, f"{name}: {column}", num_slots)

    loss_mask_L = sized(message.loss_mask, UINT8, f"{name}: loss_mask", num_slots)
    _check(
        num_slots == 0 or int(loss_mask_L.max()) <= 1,
        "loss_mask",
        f"{name}: loss_mask has other values than 0 and 1",
    )
    num_trained = int(np.count_nonzero(loss_mask_L))
    _check(int(np.count_nonzero(loss_mask_L[used:])) == 0, "loss_mask", f"{name}: trained padding")
    per_sequence: dict[str, Any] = {
        "rewards": tuple(message.rewards),
        "sequence_weights": tuple(message.sequence_weights),
        "group_numbers": tuple(message.group_numbers),
    }
    for field, values in per_sequence.items():
        same = len(values) == len(sequence_lengths)
        _check(same, field, f"{name}: {len(values)} {field} for {len(sequence_lengths)} sequences")
    return MicroBatch(
        index=message.index,
        sequence_lengths=sequence_lengths,
        input_ids_L=sized(message.input_ids, UINT32, f"{name}: input_ids", num_slots),
        loss_mask_L=loss_mask_L,
        old_logprobs_L=floats(message.old_logprobs, "old_logprobs"),
        advantages_L=floats(message.advantages, "advantages"),
        ref_logprobs_L=floats(message.ref_logprobs, "ref_logprobs")
        if message.ref_logprobs
        else None,
        returns_L=floats(message.returns, "returns") if message.returns else None,
        version_runs=runs_from_proto(message.version_runs, num_trained),
        temperature=message.temperature,
        **per_sequence,
    )


def plan_to_proto(plan: StepPlan) -> batches_pb2.StepPlan:
    return batches_pb2.StepPlan(
        step=plan.step,
        batch_id=plan.batch_id,
        group_ids=plan.group_ids,
        num_micro_batches=plan.num_micro_batches,
        num_sequences=plan.num_sequences,
        num_trained_tokens=plan.num_trained_tokens,
        publish_after=plan.publish_after,
        metrics=plan.metrics,
        provisional=plan.provisional,
        traceparents=plan.traceparents,
    )


def plan_from_proto(message: batches_pb2.StepPlan) -> StepPlan:
    """Raises MalformedMessage."""
    _check(message.step >= 0, "step", f"step plan: step={message.step} is below 0")
    _check(bool(message.batch_id), "batch_id", f"step plan {message.step}: batch_id is empty")
    _check(
        message.num_micro_batches > 0,
        "num_micro_batches",
        f"step plan {message.step}: no micro-batches",
    )
    return StepPlan(
        step=message.step,
        batch_id=message.batch_id,
        group_ids=tuple([GroupId(group_id) for group_id in message.group_ids]),
        num_micro_batches=message.num_micro_batches,
        num_sequences=message.num_sequences,
        num_trained_tokens=message.num_trained_tokens,
        publish_after=message.publish_after,
        metrics=dict(message.metrics),
        provisional=message.provisional,
        traceparents=tuple(message.traceparents),
    )
