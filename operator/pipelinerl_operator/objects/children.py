"""Everything that a job needs besides its pods: ServiceAccount, ConfigMap, Secret, Service,
NetworkPolicy and disruption budgets; and all desired objects together.
"""

from dataclasses import dataclass
from typing import Any

from pipelinerl_common.settings import API_VERSION, KIND
from pipelinerl_common.settings.load import write_yaml
from pipelinerl_control.plan import Role
from pipelinerl_operator.objects.context import Capabilities, OperatorContext
from pipelinerl_operator.objects.job_resource import JobResource, service_spec
from pipelinerl_operator.objects.names import (
    GENERATOR_PORT,
    GRPC_PORT,
    METRICS_PORT,
    NATS_CA_KEY,
    NATS_KEY,
    ROLE,
    TOKEN_KEY,
    config_name,
    generator_port,
    owned,
    secret_name,
    selector,
)
from pipelinerl_operator.objects.pods import PodSpec, pods
from pipelinerl_operator.objects.scheduling import pod_group

JOB_KEY = "job.yaml"


def config_map(job: JobResource, nats_ca: str | None = None) -> dict[str, Any]:
    document = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": job.name, "namespace": job.namespace},
        "spec": service_spec(job.spec),
    }
    return {
        **owned(job, "v1", "ConfigMap", config_name(job.name)),
        "data": {
            JOB_KEY: write_yaml(document),
            **({NATS_CA_KEY: nats_ca} if nats_ca else {}),
        },
    }


def service_account(job: JobResource) -> dict[str, Any]:
    """The account of the pods. They do not call the API server: no token is mounted."""
    return {
        **owned(job, "v1", "ServiceAccount", job.name),
        "automountServiceAccountToken": False,
    }


def job_secret(job: JobResource, token: str, nats_credentials: str | None = None) -> dict[str, Any]:
    """The Secret `<job>-token`: bearer token of weight endpoints and gRPC services, and the login
    to the streams if there is one. Created once and never updated.
    """
    data = {
        TOKEN_KEY: token,
        **({NATS_KEY: nats_credentials} if nats_credentials is not None else {}),
    }
    return {
        **owned(job, "v1", "Secret", secret_name(job.name)),
        "type": "Opaque",
        "stringData": data,
    }


def headless_service(job: JobResource) -> dict[str, Any]:
    """The Service that gives every pod the name `<pod>.<job>.<namespace>.svc`, ready or not: pods
    must connect to each other before they are ready.
    """
    ports = {"grpc": GRPC_PORT, "http": GENERATOR_PORT, "metrics": METRICS_PORT}
    return {
        **owned(job, "v1", "Service", job.name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": selector(job.name),
            "ports": [
                {"name": name, "port": port, "protocol": "TCP"} for name, port in ports.items()
            ],
        },
    }


def network_policy(job: JobResource, context: OperatorContext) -> dict[str, Any]:
    """Admits the job's own pods on every port (collectives choose theirs), the operator, and
    scrapers of metrics.
    """
    generators = range(job.spec.actors.generators_per_replica)
    scraped = [METRICS_PORT, *(generator_port(index) for index in generators)]
    capabilities = context.capabilities
    return {
        **owned(job, "networking.k8s.io/v1", "NetworkPolicy", job.name),
        "spec": {
            "podSelector": {"matchLabels": selector(job.name)},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": selector(job.name)}}]},
                {"from": [context.operator.selector(capabilities)]},
                {
                    "from": [peer.selector(capabilities) for peer in context.monitoring],
                    "ports": [{"port": port, "protocol": "TCP"} for port in scraped],
                },
            ],
        },
    }


def disruption_budgets(job: JobResource, capabilities: Capabilities) -> tuple[dict[str, Any], ...]:
    """Budgets: all trainers must stay, since they share collectives, and the fewest actors that
    training needs.
    """
    api, kind = capabilities.policy_api, "PodDisruptionBudget"
    needed = {Role.TRAINER: job.spec.trainers.replicas, Role.ACTOR: job.spec.actors.min_replicas}
    return tuple(
        {
            **owned(job, api, kind, f"{job.name}-{role.value}", **{ROLE: role.value}),
            "spec": {"minAvailable": count, "selector": {"matchLabels": selector(job.name, role)}},
        }
        for role, count in needed.items()
    )


@dataclass(frozen=True, slots=True)
class Desired:
    """Objects of a running job. The Secret is created apart, see `job_secret`."""

    config: tuple[dict[str, Any], ...]
    """Objects for server-side apply, in this order."""
    pods: tuple[PodSpec, ...]
    """Pods in start order."""


def desired_objects(job: JobResource, context: OperatorContext) -> Desired:
    """All objects that the job should have. Raises SettingsError for a podTemplate that does not
    fit, before any object of the job exists.
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
