"""All alerts. A new one is one entry in one of the tables, with a section in
charts/docs/runbooks.md.
"""

from typing import Final

from monitoring.alerts.alert import Alert
from monitoring.alerts.learning import LEARNING
from monitoring.alerts.operating import OPERATING
from monitoring.alerts.staleness import STALENESS
from monitoring.alerts.throughput import THROUGHPUT
from monitoring.alerts.weights import WEIGHTS

GROUPS: Final[dict[str, tuple[Alert, ...]]] = {
    "learning": LEARNING,
    "staleness": STALENESS,
    "throughput": THROUGHPUT,
    "weights": WEIGHTS,
    "operating": OPERATING,
}

ALERTS: Final[tuple[Alert, ...]] = tuple(alert for group in GROUPS.values() for alert in group)
