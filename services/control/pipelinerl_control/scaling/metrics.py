"""How many actors there are, for whoever wants to know."""

from collections.abc import Callable
from dataclasses import dataclass

from pipelinerl_common.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Scale:
    """Of one job at one moment. Example: Scale(desired=2, ready=1, ratio=0.97)."""

    desired: int = 0
    ready: int = 0
    ratio: float | None = None
    """At the last look at the balance; None before."""

    def values(self) -> dict[str, float]:
        """As the run's records have it."""
        counted = {"actors_desired": float(self.desired), "actors_ready": float(self.ready)}
        return counted if self.ratio is None else {**counted, "autoscale_ratio": self.ratio}


def export_scale(metrics: Metrics, now: Callable[[], Scale]) -> None:
    """Adds it to the metrics of the job's coordinator."""
    metrics.gauge("actors_desired").read(lambda: float(now().desired))
    metrics.gauge("actors_ready").read(lambda: float(now().ready))
    metrics.gauge("autoscale_ratio").read(lambda: now().ratio)
