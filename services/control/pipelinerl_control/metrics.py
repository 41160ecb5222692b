"""What the coordinator tells about itself: read from it when somebody wants to know.

How many actors there are, for whoever wants to know.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pipelinerl_common.metrics import Metrics
from pipelinerl_control.coordinator import Coordinator


def export_coordinator(coordinator: Coordinator, metrics: Metrics) -> None:
    """Adds the coordinator's metrics to those of its job."""
    counters = coordinator.counters
    metrics.gauge("served_version").read(lambda: float(coordinator.served_version))
    metrics.gauge("transfer_group_epoch").read(
        lambda: float(coordinator.group.epoch if coordinator.group else 0)
    )
    metrics.gauge("transfer_group_members").read(
        lambda: float(len(coordinator.group.members) if coordinator.group else 0)
    )
    metrics.gauge("generators_expected").read(lambda: float(coordinator.num_expected))
    metrics.gauge("generators_absent").read(lambda: float(len(coordinator.absent)))
    metrics.counter("transfer_groups_formed_total").read(lambda: float(counters.groups_formed))
    metrics.counter("transfer_group_failures_total").read(lambda: float(counters.form_failures))
    metrics.counter("updates_coordinated_total").read(
        lambda: float(counters.updates), outcome="published"
    )
    metrics.counter("updates_coordinated_total").read(
        lambda: float(counters.update_failures), outcome="failed"
    )
    metrics.counter("member_expulsions_total").read(lambda: float(counters.expulsions))


@dataclass(frozen=True, slots=True)
class ActorScale:
    """Of one job at one moment. Example: Scale(desired=2, ready=1, ratio=0.97)."""

    desired: int = 0
    ready: int = 0
    ratio: float | None = None
    """At the last look at the balance; None before."""

    def values(self) -> dict[str, float]:
        """As the run's records have it."""
        counted = {"actors_desired": float(self.desired), "actors_ready": float(self.ready)}
        return counted if self.ratio is None else {**counted, "autoscale_ratio": self.ratio}


def export_scale(metrics: Metrics, now: Callable[[], ActorScale]) -> None:
    """Adds it to the metrics of the job's coordinator."""
    metrics.gauge("actors_desired").read(lambda: float(now().desired))
    metrics.gauge("actors_ready").read(lambda: float(now().ready))
    metrics.gauge("autoscale_ratio").read(lambda: now().ratio)
