"""From the records of all of a job's processes to one row per optimizer step."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from pipelinerl.v1.metrics_pb2 import MetricsRecord

TRAINER = "trainer"
_LABELS = re.compile(r"\{(.*)\}$")
_MARK = "reward_mean"
"""What a record has that ends a step."""


@dataclass(frozen=True, slots=True)
class Row:
    """What is known at the end of a step. Example: Row(12, 1764446400.5, {"trainer/ess": 0.97,
    "actor/memory_bytes": 2e8}).
    """

    step: int
    time: float
    """Seconds since 1970."""
    values: Mapping[str, float]


class RowBuilder:
    """Remembers the newest values of every process. Those of a role are added up, means are
    averaged.
    """

    def __init__(self, since: float) -> None:
        """Records older than `since` (seconds since 1970) are passed over: an earlier process has
        shown them.
        """
        self._since = since
        self._newest: dict[tuple[str, str], dict[str, float]] = {}

    def take(self, record: MetricsRecord) -> Row | None:
        """The row, when the record ends a step."""
        if record.time < self._since:
            return None
        values = {
            _key(name): value
            for name, value in record.values.items()
            if math.isfinite(value) and "_bucket{" not in name
        }
        if record.role == TRAINER:
            if record.step < 0 or _MARK not in record.values:
                return None
            own = {f"{TRAINER}/{name}": value for name, value in values.items()}
            return Row(record.step, record.time, {**own, **self._of_roles()})
        self._newest.setdefault((record.role, record.instance), {}).update(values)
        return None

    def _of_roles(self) -> dict[str, float]:
        found: dict[str, list[float]] = {}
        for (role, _), values in self._newest.items():
            for name, value in values.items():
                found.setdefault(f"{role}/{name}", []).append(value)
        return {
            name: sum(each) / (len(each) if name.endswith(("_mean", "_ratio")) else 1)
            for name, each in found.items()
        }


def _key(name: str) -> str:
    """Names with labels as paths: "queue_groups{stage=ready}" is "queue_groups/ready"."""
    labels = _LABELS.search(name)
    if labels is None:
        return name
    return "/".join(
        [name[: labels.start()], *(label.partition("=")[2] for label in labels[1].split(","))]
    )
