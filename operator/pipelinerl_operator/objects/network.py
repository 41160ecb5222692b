"""How pods find one another, and who may reach them."""

from typing import Any

from pipelinerl_operator.objects.context import OperatorContext
from pipelinerl_operator.objects.job_resource import JobResource
from pipelinerl_operator.objects.labels import metadata, selector
from pipelinerl_operator.objects.ports import (
    GENERATOR_PORT,
    GRPC_PORT,
    METRICS_PORT,
    generator_port,
)


def headless_service(job: JobResource) -> dict[str, Any]:
    """`<pod>.<job>.<namespace>.svc` for every pod, ready or not: they must meet before they can be
    ready.
    """
    ports = {"grpc": GRPC_PORT, "http": GENERATOR_PORT, "metrics": METRICS_PORT}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job, job.name),
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
    """Lets in the job's own pods on every port (collectives choose theirs), the operator, and who
    scrapes metrics.
    """
    generators = range(job.spec.actors.generators_per_replica)
    scraped = [METRICS_PORT, *(generator_port(index) for index in generators)]
    capabilities = context.capabilities
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(job, job.name),
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
