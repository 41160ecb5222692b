"""The chart's Grafana dashboards. A new one is one file and one line here."""

from collections.abc import Callable, Mapping
from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard

from monitoring.dashboards.operating import operating
from monitoring.dashboards.overview import overview
from monitoring.dashboards.page import to_json
from monitoring.dashboards.staleness import staleness
from monitoring.dashboards.throughput import throughput
from monitoring.dashboards.weights import weights

__all__ = ["DASHBOARDS", "to_json"]

DASHBOARDS: Final[Mapping[str, Callable[[], Dashboard]]] = {
    "overview": overview,
    "staleness": staleness,
    "throughput": throughput,
    "weights": weights,
    "operating": operating,
}
"""By the name of their file."""
