"""What the run is waiting for until its first step, in words."""

from collections.abc import Collection

from pipelinerl_cli.up.view import GENERATING, RunView
from pipelinerl_operator.coordinator import Coordinator

STEADY = ("every ready generator is a member", "an update is running")


def describe_phase(generators: Collection[str], coordinator: Coordinator, view: RunView) -> tuple[str, str]:
    """The phase and a detail. `generators` are those that should be in the group."""
    trouble = "" if coordinator.waiting_for in STEADY else coordinator.waiting_for
    if view.is_training:
        return "training", trouble
    absent = [name for name in generators if name in coordinator.absent]
    if absent:
        ready = len(generators) - len(absent)
        return f"loading: {ready} of {len(generators)} generators ready", f"waiting for {', '.join(absent[:3])}"
    if coordinator.group is None:
        return "forming the weight-transfer group", coordinator.waiting_for
    if coordinator.served_version < 0:
        return "sending the first weights to the generators", trouble
    generated = view.total("actor", "tokens_generated_total") or 0
    ready_groups = view.gauge("preprocessor", "queue_groups{stage=ready}") or 0
    return GENERATING, f"{generated:,.0f} tokens, {ready_groups:.0f} groups ready"
