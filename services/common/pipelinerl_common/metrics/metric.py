"""What a metric is: one row of the catalog."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

PREFIX: Final = "pipelinerl_"

ACTOR: Final = "actor"
GENERATOR: Final = "generator"
REFERENCE: Final = "reference"
PREPROCESSOR: Final = "preprocessor"
TRAINER: Final = "trainer"
EVALUATOR: Final = "evaluator"
COORDINATOR: Final = "coordinator"
"""The weight-transfer coordinator, and what keeps the job's processes running: `pipelinerl up`, or
the operator.
"""
OPERATOR: Final = "operator"
"""The operator itself, over all jobs."""

ROLES: Final = (
    PREPROCESSOR,
    ACTOR,
    GENERATOR,
    REFERENCE,
    TRAINER,
    EVALUATOR,
    COORDINATOR,
    OPERATOR,
)
JOB_ROLES: Final = ROLES[:-1]
"""Roles that belong to one job."""


class Kind(StrEnum):
    COUNTER = "counter"
    """Only grows; its name ends in `_total`. A restart of its process begins at 0 again."""
    GAUGE = "gauge"
    """Goes up and down; missing while there is no value."""
    HISTOGRAM = "histogram"
    """Counts values by size, with their number and their sum."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `name` is that of the run's records; with `pipelinerl_` before it, that of the
    Prometheus series.

    Example: Metric("groups_dropped_total", COUNTER, "groups", (PREPROCESSOR,), "...", {"reason":
    ("stale", ...)}).
    """

    name: str
    kind: Kind
    unit: str
    """A base unit (seconds, bytes, tokens, groups, steps, ...), or "ratio" for shares of 1."""
    roles: tuple[str, ...]
    """Processes that export it."""
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Labels beside `job` and `role`, each with the values that are known beforehand; of one label
    alone these begin at 0.
    """
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, without infinity."""
    records_buckets: bool = False
    """Whether the run's records carry a histogram's buckets, not only its number and sum."""

    @property
    def series(self) -> str:
        """Name of the Prometheus series; a histogram's has `_bucket`, `_sum` or `_count` behind it."""
        return PREFIX + self.name


def counter(
    name: str,
    unit: str,
    roles: tuple[str, ...],
    help: str,
    labels: Mapping[str, tuple[str, ...]] | None = None,
) -> Metric:
    return Metric(name, Kind.COUNTER, unit, roles, help, labels or {})


def gauge(
    name: str,
    unit: str,
    roles: tuple[str, ...],
    help: str,
    labels: Mapping[str, tuple[str, ...]] | None = None,
) -> Metric:
    return Metric(name, Kind.GAUGE, unit, roles, help, labels or {})


SECONDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Buckets for times of which nothing is known but that they are below minutes."""
