"""What the coordinator tells about itself: read from it when somebody wants to know."""

from pipelinerl_common.metrics import Metrics
from pipelinerl_control.coordinator.coordinator import Coordinator


def export(coordinator: Coordinator, metrics: Metrics) -> None:
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
