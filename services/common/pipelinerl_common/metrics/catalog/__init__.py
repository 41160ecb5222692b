"""All metrics of the project. A new one is one row in one of the tables; `charts/docs/metrics.md`
is generated from them.
"""

from collections.abc import Mapping
from typing import Final

from pipelinerl_common.metrics.catalog.evaluation import EVALUATION
from pipelinerl_common.metrics.catalog.generation import GENERATION
from pipelinerl_common.metrics.catalog.learning import LEARNING
from pipelinerl_common.metrics.catalog.ledger import LEDGER
from pipelinerl_common.metrics.catalog.operating import OPERATOR_METRICS
from pipelinerl_common.metrics.catalog.processes import PROCESSES
from pipelinerl_common.metrics.catalog.weights import WEIGHTS
from pipelinerl_common.metrics.metric import Metric

TABLES: Final[Mapping[str, tuple[Metric, ...]]] = {
    "Learning": LEARNING,
    "Queues, staleness and drops": LEDGER,
    "Generation": GENERATION,
    "Weight updates": WEIGHTS,
    "Evaluation": EVALUATION,
    "Processes": PROCESSES,
    "Operator": OPERATOR_METRICS,
}
"""By the section of the documentation."""

CATALOG: Final[Mapping[str, Metric]] = {
    metric.name: metric for table in TABLES.values() for metric in table
}
"""By name, without `pipelinerl_`."""


def metrics_of(role: str) -> tuple[Metric, ...]:
    """What processes of `role` export."""
    return tuple(metric for metric in CATALOG.values() if role in metric.roles)
