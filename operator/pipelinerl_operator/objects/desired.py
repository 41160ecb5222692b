"""Everything that a job should have in the cluster."""

from dataclasses import dataclass
from typing import Any

from pipelinerl_operator.objects.config import config_map, service_account
from pipelinerl_operator.objects.context import OperatorContext
from pipelinerl_operator.objects.disruption import disruption_budgets
from pipelinerl_operator.objects.gang import pod_group
from pipelinerl_operator.objects.job_resource import JobResource
from pipelinerl_operator.objects.network import headless_service, network_policy
from pipelinerl_operator.objects.pods import PodSpec, pods


@dataclass(frozen=True, slots=True)
class Desired:
    """Of a job that runs. The Secret is not among it: see `secret`."""

    config: tuple[dict[str, Any], ...]
    """Ready for server-side apply, in this order: ServiceAccount, ConfigMap, Service,
    NetworkPolicy, budgets, PodGroup.
    """
    pods: tuple[PodSpec, ...]
    """In start order."""


def desired_objects(job: JobResource, context: OperatorContext) -> Desired:
    """Pure and cheap. Raises SettingsError for a podTemplate that does not fit, before anything of
    the job exists.
    """
    optional = [network_policy(job, context) if context.network_policy else None, pod_group(job)]
    config = (
        service_account(job),
        config_map(job, context.nats_ca),
        headless_service(job),
        *disruption_budgets(job, context.capabilities),
        *(each for each in optional if each is not None),
    )
    wanted = pods(job, context)
    for pod in wanted:
        if pod.index == 0 and pod.template:
            pod.manifest(attempt=0)
    return Desired(config, wanted)
