"""The batch of one step: packed rows for every rank and the plan that goes with them.

`assemble` packs a whole batch; `StreamingBatch` grows group by group for a streaming policy, and
its rows are delivered before the last group is ready.
"""

import hashlib
import math
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipelinerl_common.types import GroupId, MicroBatch, StepPlan
from pipelinerl_preprocessor.packing import Assignment, pack
from pipelinerl_preprocessor.preparation import PreparedGroup
from pipelinerl_preprocessor.rows import TrainSequence, build_row

Member = tuple[int, TrainSequence]
"""Number of a group within its batch, and one of its sequences."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The shape and the columns of the rows that the trainer asks for."""

    num_ranks: int
    row_tokens: int
    temperature: float
    reference: bool
    returns: bool


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """`rows[rank]` are the micro-batches of a rank, the same number for each."""

    plan: StepPlan
    rows: tuple[tuple[MicroBatch, ...], ...]


def assemble(
    step: int,
    groups: Sequence[PreparedGroup],
    layout: RowLayout,
    *,
    publish_after: bool,
    traceparents: tuple[str, ...] = (),
) -> PackedBatch:
    """Packs the groups' sequences. The same groups and layout give the same rows and the same batch
    id.
    """
    members = [
        (number, sequence) for number, group in enumerate(groups) for sequence in group.sequences
    ]
    assignment, rows = pack_rows(members, layout)
    attempts = [f"{group.group_id}:{group.attempt}" for group in groups]
    content = hashlib.sha256(",".join([str(layout.num_ranks), *attempts]).encode()).hexdigest()
    plan = StepPlan(
        step=step,
        batch_id=f"{step}-{content[:16]}",
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
        traceparents=traceparents,
    )
    return PackedBatch(plan, rows)


def pack_rows(
    members: Sequence[Member], layout: RowLayout, first_index: int = 0
) -> tuple[Assignment, tuple[tuple[MicroBatch, ...], ...]]:
    """The rows of every rank for `members`; micro-batches are numbered from `first_index`."""
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
    """Means over all trajectories of the batch, masked and empty ones included. A mean without
    values, such as that of a task without a success metric, is left out.
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


class StreamingBatch:
    """A batch that grows. Sequences wait until they fill a row of every rank; the last group
    completes the rows.

    Every rank has the same number of rows at any time. The batch id is this object's own: after a
    crash another one is assembled, perhaps of other groups.
    """

    def __init__(
        self, step: int, layout: RowLayout, num_groups: int, *, publish_after: bool
    ) -> None:
        self.step = step
        self.layout = layout
        self.batch_id = f"{step}-{uuid.uuid4().hex[:16]}"
        self._num_groups = num_groups
        self._publish_after = publish_after
        self._groups: list[PreparedGroup] = []
        self._waiting: list[Member] = []
        self._rows: tuple[list[MicroBatch], ...] = tuple([] for _ in range(layout.num_ranks))
        self._metrics: dict[str, float] = {}
        self._traceparents: list[str] = []

    @property
    def group_ids(self) -> tuple[GroupId, ...]:
        return tuple(GroupId(group.group_id) for group in self._groups)

    @property
    def num_rows(self) -> int:
        """The number of rows that each rank has so far."""
        return len(self._rows[0])

    @property
    def is_complete(self) -> bool:
        return len(self._groups) == self._num_groups

    def add(self, group: PreparedGroup, traceparent: str = "") -> None:
        """Adds a group with its trace context. The last one gives the plan its metrics."""
        self._traceparents += [traceparent] if traceparent else []
        self._waiting += [(len(self._groups), sequence) for sequence in group.sequences]
        self._groups.append(group)
        num_waiting = sum(sequence.num_tokens for _, sequence in self._waiting)
        if self.is_complete or num_waiting >= self.layout.row_tokens * self.layout.num_ranks:
            _, rows = pack_rows(self._waiting, self.layout, self.num_rows)
            self._waiting = []
            for mine, new in zip(self._rows, rows, strict=True):
                mine.extend(new)
        if self.is_complete:
            self._metrics = {**batch_metrics(self._groups), **self._packing()}

    def after(self, num_had: int) -> PackedBatch:
        """The plan as it is now, and the rows of every rank except its first `num_had`."""
        sequences = [sequence for group in self._groups for sequence in group.sequences]
        plan = StepPlan(
            step=self.step,
            batch_id=self.batch_id,
            group_ids=self.group_ids,
            num_micro_batches=self.num_rows,
            num_sequences=sum(group.num_sequences for group in self._groups),
            num_trained_tokens=sum(sequence.num_trained for sequence in sequences),
            publish_after=self._publish_after,
            metrics=self._metrics,
            provisional=not self.is_complete,
            traceparents=tuple(self._traceparents),
        )
        return PackedBatch(plan, tuple(tuple(rows[num_had:]) for rows in self._rows))

    def _packing(self) -> dict[str, float]:
        tokens = [sum(sum(row.sequence_lengths) for row in rows) for rows in self._rows]
        num_slots = sum(row.num_slots for rows in self._rows for row in rows)
        return {
            "packing_fill": sum(tokens) / num_slots,
            "packing_imbalance": (max(tokens) - min(tokens)) / max(max(tokens), 1),
        }
