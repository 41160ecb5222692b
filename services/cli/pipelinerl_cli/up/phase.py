"""What the run is waiting for until its first step, in words."""

from collections.abc import Collection

from pipelinerl_cli.up.silence import explained
from pipelinerl_cli.up.view import GENERATING, RunView
from pipelinerl_common.words import counted, nouns
from pipelinerl_operator.coordinator import Coordinator

MOST_NAMED = 3
STEADY = ("every ready generator is a member", "an update is running")


def describe_phase(
    generators: Collection[str], coordinator: Coordinator, view: RunView
) -> tuple[str, str]:
    """The phase and a detail. `generators` are those that should be in the group."""
    trouble = "" if coordinator.waiting_for in STEADY else coordinator.waiting_for
    if silent := coordinator.silent:
        trouble = "; ".join(
            explained(name, seconds) for name, seconds in list(silent.items())[:MOST_NAMED]
        )
    if view.is_training:
        return "training", trouble
    absent = [name for name in generators if name in coordinator.absent]
    if absent:
        ready = len(generators) - len(absent)
        waiting = trouble if silent else f"waiting for {', '.join(absent[:MOST_NAMED])}"
        return f"loading: {ready} of {counted(len(generators), 'generator')} ready", waiting
    if coordinator.group is None:
        return "forming the weight-transfer group", coordinator.waiting_for
    if coordinator.served_version < 0:
        return "sending the first weights to the generators", trouble
    generated = view.gauge("actor", "tokens_generated_total") or 0
    ready_groups = view.gauge("preprocessor", "queue_groups{stage=ready}") or 0
    return (
        GENERATING,
        f"{generated:,.0f} {nouns(generated, 'token')}, {counted(ready_groups, 'group')} ready",
    )
