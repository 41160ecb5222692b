"""The type of a row in the catalog of metrics, and the functions that make rows."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
"""The weight-transfer coordinator with the supervisor of the job's processes: `pipelinerl up` or
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
    """The type of a metric in Prometheus."""

    COUNTER = "counter"
    """Only grows; its name ends in `_total`. It starts at 0 again when its process restarts."""
    GAUGE = "gauge"
    """Goes up and down; it is missing while there is no value."""
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
    """Labels beside `job` and `role`, each with its values known beforehand. The series of a
    counter with a single label exist from the start, at 0.
    """
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, without infinity."""
    records_buckets: bool = False
    """Whether the run's records carry a histogram's buckets, not only its number and sum."""

    @property
    def series(self) -> str:
        """Name of the Prometheus series, without a histogram's `_bucket`, `_sum` or `_count`."""
        return PREFIX + self.name


def counter(
    name: str, unit: str, help: str, labels: Mapping[str, tuple[str, ...]] | None = None
) -> Metric:
    return Metric(name, Kind.COUNTER, unit, (), help, labels or {})


def gauge(
    name: str, unit: str, help: str, labels: Mapping[str, tuple[str, ...]] | None = None
) -> Metric:
    return Metric(name, Kind.GAUGE, unit, (), help, labels or {})


def histogram(
    name: str,
    unit: str,
    help: str,
    buckets: tuple[float, ...],
    labels: Mapping[str, tuple[str, ...]] | None = None,
    records_buckets: bool = False,
) -> Metric:
    return Metric(name, Kind.HISTOGRAM, unit, (), help, labels or {}, buckets, records_buckets)


def exported_by(roles: tuple[str, ...], *metrics: Metric) -> tuple[Metric, ...]:
    """`metrics` as those that processes of `roles` export."""
    return tuple(replace(metric, roles=roles) for metric in metrics)


SECONDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Buckets for durations up to some minutes."""
