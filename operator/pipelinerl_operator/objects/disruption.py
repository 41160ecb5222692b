"""PodDisruptionBudgets. Integers, because pods without a workload controller allow no percentages."""

from typing import Any

from pipelinerl_control.plan import Role
from pipelinerl_operator.objects.context import Capabilities
from pipelinerl_operator.objects.job_resource import JobResource
from pipelinerl_operator.objects.labels import ROLE, metadata, selector


def disruption_budgets(job: JobResource, capabilities: Capabilities) -> tuple[dict[str, Any], ...]:
    """Trainers share collectives: one that leaves stops all. Of the actors the fewest that training
    needs must stay.
    """
    needed = {Role.TRAINER: job.spec.trainers.replicas, Role.ACTOR: job.spec.actors.min_replicas}
    return tuple(
        {
            "apiVersion": capabilities.policy_api,
            "kind": "PodDisruptionBudget",
            "metadata": metadata(job, f"{job.name}-{role.value}", **{ROLE: role.value}),
            "spec": {"minAvailable": count, "selector": {"matchLabels": selector(job.name, role)}},
        }
        for role, count in needed.items()
    )
