"""Names, labels, ports and addresses of everything that belongs to a job."""

from pathlib import Path
from typing import Any

from pipelinerl_control.plan import (
    HTTP_ROLES,
    Endpoints,
    Role,
    generator_names,
    reference_names,
    role_of,
)
from pipelinerl_operator.objects.context import OperatorContext
from pipelinerl_operator.objects.job_resource import JobResource

MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "pipelinerl-operator"
PREFIX = "pipelinerl.dev/"
JOB, ROLE, INDEX, ATTEMPT = (f"{PREFIX}{word}" for word in ("job", "role", "index", "attempt"))
TEMPLATE_HASH = f"{PREFIX}template-hash"
"""Annotation of a pod with the hash of what it was made from."""

POD_ROLES = (Role.PREPROCESSOR, Role.REFERENCE, Role.TRAINER, Role.ACTOR, Role.EVALUATOR)


def pod_name(job: str, role: Role, index: int) -> str:
    return f"{job}-{role.value}-{index}"


def secret_name(job: str) -> str:
    return f"{job}-token"


def config_name(job: str) -> str:
    return f"{job}-job"


def job_labels(job: str) -> dict[str, str]:
    """Labels of all objects of a job, by which the operator finds them."""
    return {MANAGED_BY: MANAGER, JOB: job}


def selector(job: str, role: Role | None = None) -> dict[str, str]:
    """Labels that select the pods of a job, or of one role."""
    return {JOB: job, **({ROLE: role.value} if role else {})}


def owned(
    job: JobResource, api_version: str, kind: str, name: str, **labels: str
) -> dict[str, Any]:
    """An object that the job owns, so far without content."""
    metadata = {
        "name": name,
        "namespace": job.namespace,
        "labels": {**job_labels(job.name), **labels},
        "ownerReferences": [job.owner_reference()],
    }
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}


GRPC_PORT = 7000
GENERATOR_PORT = 8000
METRICS_PORT = 9090
RENDEZVOUS_PORT = 29500
"""Port of the trainer ranks' own group."""
LOOPBACK = "127.0.0.1"
EVERY_INTERFACE = "0.0.0.0"
TOKEN_KEY = "token"
NATS_KEY = "nats.creds"
NATS_CA_KEY = "nats-ca.crt"

JOB_FILE = Path("/etc/pipelinerl/job/job.yaml")
SECRET_FOLDER = Path("/etc/pipelinerl/secret")


_LISTEN_HOSTS = {Role.TRAINER: "$(PRL_POD_IP)", Role.EVALUATOR: LOOPBACK}
"""Generators receive the trainer's address when a group is formed: the pod's own, for which no
stale DNS record exists. The evaluator's generator serves only the evaluator.
"""


def generator_port(index: int) -> int:
    """Port of a generator; those of one actor share its pod's address."""
    return GENERATOR_PORT + index


def pod_host(job: JobResource, role: Role, index: int) -> str:
    """DNS name of a pod, which remains the same for its replacement."""
    return f"{pod_name(job.name, role, index)}.{job.name}.{job.namespace}.svc"


def pod_of(job: JobResource, workload: str) -> tuple[Role, int]:
    """Role and index of the pod of a process: generators run in the pod of their actor, and ranks
    in that of their node.
    """
    role, index = role_of(workload), int(workload.rpartition("-")[2])
    if role is Role.GENERATOR:
        return Role.ACTOR, int(workload.split("-")[1])
    if role is Role.TRAINER:
        return role, index // job.spec.trainers.processes_per_node
    return role, index


def port_of(workload: str) -> int:
    role, index = role_of(workload), int(workload.rpartition("-")[2])
    if role is Role.GENERATOR:
        return generator_port(index)
    return GENERATOR_PORT if role in (Role.REFERENCE, Role.EVALUATOR) else GRPC_PORT


def endpoints(
    job: JobResource, context: OperatorContext, names: tuple[str, ...], output: Path
) -> Endpoints:
    """Endpoints for the processes `names` of one pod, which reach each other on its loopback and
    other processes by DNS.
    """
    peers = ("preprocessor-0", *reference_names(job.job), *generator_names(job.job, 0))
    addresses = {name: f"{pod_host(job, *pod_of(job, name))}:{port_of(name)}" for name in peers}
    addresses |= {name: f"{LOOPBACK}:{port_of(name)}" for name in names}
    # The other processes of the pod are reached on its loopback, where no DNS record can be stale.
    master = LOOPBACK if "trainer-0" in names else pod_host(job, Role.TRAINER, 0)
    return Endpoints(
        job_file=JOB_FILE,
        output=output,
        nats_url=context.nats_url,
        coordinator=context.coordinator,
        addresses=addresses,
        trainer_master=f"{master}:{RENDEZVOUS_PORT}",
        token_file=SECRET_FOLDER / TOKEN_KEY,
        nats_ca_file=JOB_FILE.parent / NATS_CA_KEY if context.nats_ca else None,
        nats_credentials=SECRET_FOLDER / NATS_KEY if context.has_nats_credentials else None,
        metrics_addresses={
            name: f"{EVERY_INTERFACE}:{METRICS_PORT}"
            for name in names
            if role_of(name) not in HTTP_ROLES
        },
        log_level=context.log_level,
        listen_hosts={role: EVERY_INTERFACE for role in Role} | _LISTEN_HOSTS,
    )
