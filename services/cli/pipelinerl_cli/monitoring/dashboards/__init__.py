"""The chart's Grafana dashboards. A new one is one file and one line here."""

from collections.abc import Callable, Mapping
from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard

from pipelinerl_cli.monitoring.dashboards.operating import operating
from pipelinerl_cli.monitoring.dashboards.overview import overview
from pipelinerl_cli.monitoring.dashboards.page import to_json
from pipelinerl_cli.monitoring.dashboards.staleness import staleness
from pipelinerl_cli.monitoring.dashboards.throughput import throughput
from pipelinerl_cli.monitoring.dashboards.weights import weights

__all__ = ["DASHBOARDS", "to_json"]

DASHBOARDS: Final[Mapping[str, Callable[[], Dashboard]]] = {
    "overview": overview,
    "staleness": staleness,
    "throughput": throughput,
    "weights": weights,
    "operating": operating,
}
"""By the name of their file."""
