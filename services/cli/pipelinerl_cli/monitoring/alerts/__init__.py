"""All alerts. A new one is one entry in one of the tables, with a section in
charts/docs/runbooks.md.
"""

from typing import Final

from pipelinerl_cli.monitoring.alerts.alert import Alert
from pipelinerl_cli.monitoring.alerts.learning import LEARNING
from pipelinerl_cli.monitoring.alerts.operating import OPERATING
from pipelinerl_cli.monitoring.alerts.staleness import STALENESS
from pipelinerl_cli.monitoring.alerts.throughput import THROUGHPUT
from pipelinerl_cli.monitoring.alerts.weights import WEIGHTS

GROUPS: Final[dict[str, tuple[Alert, ...]]] = {
    "learning": LEARNING,
    "staleness": STALENESS,
    "throughput": THROUGHPUT,
    "weights": WEIGHTS,
    "operating": OPERATING,
}

ALERTS: Final[tuple[Alert, ...]] = tuple(alert for group in GROUPS.values() for alert in group)
