"""The batch of one step: packed rows for every rank and the plan that goes with them."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipelinerl_common.types import GroupId, MicroBatch, StepPlan
from pipelinerl_preprocessor.packing import Assignment, pack
from pipelinerl_preprocessor.preparation import PreparedGroup
from pipelinerl_preprocessor.rows import TrainSequence, build_row


@dataclass(frozen=True, slots=True)
class Layout:
    """How the trainer wants its rows."""

    num_ranks: int
    row_tokens: int
    temperature: float
    reference: bool
    returns: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """`rows[rank]` are the micro-batches of a rank, as many for each."""

    plan: StepPlan
    rows: tuple[tuple[MicroBatch, ...], ...]


def assemble(
    step: int, groups: Sequence[PreparedGroup], layout: Layout, *, publish_after: bool
) -> Batch:
    """Packs the groups' sequences. The same groups and layout give the same rows and the same batch
    id.
    """
    members = [
        (number, sequence) for number, group in enumerate(groups) for sequence in group.sequences
    ]
    assignment, rows = pack_rows(members, layout)
    plan = StepPlan(
        step=step,
        batch_id=_batch_id(step, groups, layout),
        group_ids=tuple(GroupId(group.group_id) for group in groups),
        num_micro_batches=assignment.num_micro_batches,
        num_sequences=sum(group.num_sequences for group in groups),
        num_trained_tokens=sum(sequence.num_trained for _, sequence in members),
        publish_after=publish_after,
        metrics={
            **batch_metrics(groups),
            "packing_fill": assignment.fill,
            "packing_imbalance": assignment.imbalance,
        },
    )
    return Batch(plan, rows)


def pack_rows(
    members: Sequence[tuple[int, TrainSequence]], layout: Layout, first_index: int = 0
) -> tuple[Assignment, tuple[tuple[MicroBatch, ...], ...]]:
    """Rows of every rank for `members`, (group number, sequence) pairs; micro-batches are numbered
    from `first_index`.
    """
    assignment = pack(
        [sequence.num_tokens for _, sequence in members], layout.row_tokens, layout.num_ranks
    )
    rows = tuple(
        tuple(
            build_row(
                first_index + index,
                [members[place] for place in row],
                assignment.num_slots(rank, index),
                layout.temperature,
                reference=layout.reference,
                returns=layout.returns,
            )
            for index, row in enumerate(rank_rows)
        )
        for rank, rank_rows in enumerate(assignment.rows)
    )
    return assignment, rows


def batch_metrics(groups: Sequence[PreparedGroup]) -> dict[str, float]:
    """Means over all trajectories of the batch, masked and empty ones included. Without a success
    metric there is no mean.
    """
    means = {
        "reward_mean": _mean(reward for group in groups for reward in group.rewards),
        "success_mean": _mean(success for group in groups for success in group.successes),
        "completion_length_mean": _mean(
            length for group in groups for length in group.completion_lengths
        ),
        "completion_overflow_ratio": _mean(float(cut) for group in groups for cut in group.cut_off),
    }
    return {name: value for name, value in means.items() if not math.isnan(value)}


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else math.nan


def _batch_id(step: int, groups: Sequence[PreparedGroup], layout: Layout) -> str:
    content = ",".join(
        [str(layout.num_ranks), *(f"{group.group_id}:{group.attempt}" for group in groups)]
    )
    return f"{step}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
