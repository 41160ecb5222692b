"""Metrics: the catalog of all of them, a process's own, and `/metrics`."""

from pipelinerl_common.metrics.catalog import CATALOG, TABLES, metrics_of
from pipelinerl_common.metrics.exposition import CONTENT_TYPE, exposition_of, serve_metrics
from pipelinerl_common.metrics.metric import (
    ACTOR,
    COORDINATOR,
    EVALUATOR,
    GENERATOR,
    JOB_ROLES,
    OPERATOR,
    PREFIX,
    PREPROCESSOR,
    REFERENCE,
    ROLES,
    TRAINER,
    Kind,
    Metric,
)
from pipelinerl_common.metrics.registry import (
    Counter,
    Gauge,
    Histogram,
    Metrics,
    UndeclaredMetric,
    is_counter,
    record_of,
)

__all__ = [
    "ACTOR",
    "CATALOG",
    "CONTENT_TYPE",
    "COORDINATOR",
    "EVALUATOR",
    "GENERATOR",
    "JOB_ROLES",
    "OPERATOR",
    "PREFIX",
    "PREPROCESSOR",
    "REFERENCE",
    "ROLES",
    "TABLES",
    "TRAINER",
    "Counter",
    "Gauge",
    "Histogram",
    "Kind",
    "Metric",
    "Metrics",
    "UndeclaredMetric",
    "exposition_of",
    "is_counter",
    "metrics_of",
    "record_of",
    "serve_metrics",
]
