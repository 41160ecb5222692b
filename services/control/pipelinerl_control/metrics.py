"""Metrics of a job's coordinator and of its number of actors, read when they are scraped."""

from collections.abc import Callable
from dataclasses import dataclass

from pipelinerl_common.metrics import Metrics
from pipelinerl_control.coordinator import Coordinator
from pipelinerl_control.membership import WeightGroup


def export_coordinator(coordinator: Coordinator, metrics: Metrics) -> None:
    """Adds the coordinator's metrics to those of its job."""

    def number(value: Callable[[WeightGroup], int]) -> Callable[[], float]:
        return lambda: float(value(coordinator.group)) if coordinator.group else 0.0

    counters = coordinator.counters
    metrics.gauge("served_version").read(lambda: float(coordinator.served_version))
    metrics.gauge("transfer_group_epoch").read(number(lambda group: group.epoch))
    metrics.gauge("transfer_group_members").read(number(lambda group: len(group.members)))
    metrics.gauge("generators_expected").read(lambda: float(coordinator.num_expected))
    metrics.gauge("generators_absent").read(lambda: float(len(coordinator.absent)))
    metrics.counter("transfer_groups_formed_total").read(lambda: float(counters.groups_formed))
    metrics.counter("transfer_group_failures_total").read(lambda: float(counters.form_failures))
    updates = metrics.counter("updates_coordinated_total")
    updates.read(lambda: float(counters.updates), outcome="published")
    updates.read(lambda: float(counters.update_failures), outcome="failed")
    metrics.counter("member_expulsions_total").read(lambda: float(counters.expulsions))


@dataclass(frozen=True, slots=True)
class ActorScale:
    """Number of actors of a job. Example: ActorScale(desired=2, ready=1, ratio=0.97)."""

    desired: int = 0
    ready: int = 0
    ratio: float | None = None
    """Ratio of throughputs when the number was last decided; None before."""

    def values(self) -> dict[str, float]:
        """The values as they stand in the run's records."""
        counted = {"actors_desired": float(self.desired), "actors_ready": float(self.ready)}
        return counted if self.ratio is None else {**counted, "autoscale_ratio": self.ratio}


def export_scale(metrics: Metrics, now: Callable[[], ActorScale]) -> None:
    """Adds the number of actors to the metrics of the job's coordinator."""
    metrics.gauge("actors_desired").read(lambda: float(now().desired))
    metrics.gauge("actors_ready").read(lambda: float(now().ready))
    metrics.gauge("autoscale_ratio").read(lambda: now().ratio)
