"""The batch of a streaming policy: it grows group by group, and rows go out before the last group
is there.
"""

import uuid

from pipelinerl_common.types import GroupId, MicroBatch, StepPlan
from pipelinerl_preprocessor.batch import Batch, Layout, batch_metrics, pack_rows
from pipelinerl_preprocessor.preparation import PreparedGroup
from pipelinerl_preprocessor.rows import TrainSequence


class GrowingBatch:
    """Sequences wait until they fill a row of every rank; the last group brings out the rest.

    Every rank has the same number of rows at any time. The batch id is this object's: after a crash
    another one is assembled, perhaps of other groups.
    """

    def __init__(self, step: int, layout: Layout, num_groups: int, *, publish_after: bool) -> None:
        self.step = step
        self.layout = layout
        self.batch_id = f"{step}-{uuid.uuid4().hex[:16]}"
        self._num_groups = num_groups
        self._publish_after = publish_after
        self._groups: list[PreparedGroup] = []
        self._waiting: list[tuple[int, TrainSequence]] = []
        self._rows: tuple[list[MicroBatch], ...] = tuple([] for _ in range(layout.num_ranks))
        self._metrics: dict[str, float] = {}
        self._traceparents: list[str] = []

    @property
    def group_ids(self) -> tuple[GroupId, ...]:
        return tuple(GroupId(group.group_id) for group in self._groups)

    @property
    def num_rows(self) -> int:
        """Of each rank, so far."""
        return len(self._rows[0])

    @property
    def is_complete(self) -> bool:
        return len(self._groups) == self._num_groups

    def add(self, group: PreparedGroup, traceparent: str = "") -> None:
        """The next group, with its trace context. The plan has metrics once it is the last one."""
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

    def after(self, num_had: int) -> Batch:
        """The plan as it is now, and the rows of every rank but its first `num_had`."""
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
        return Batch(plan, tuple(tuple(rows[num_had:]) for rows in self._rows))

    def _packing(self) -> dict[str, float]:
        tokens = [sum(sum(row.sequence_lengths) for row in rows) for rows in self._rows]
        num_slots = sum(row.num_slots for rows in self._rows for row in rows)
        return {
            "packing_fill": sum(tokens) / num_slots,
            "packing_imbalance": (max(tokens) - min(tokens)) / max(max(tokens), 1),
        }
