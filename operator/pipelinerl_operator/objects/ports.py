"""Ports in pods, and the addresses of a job's processes."""

from pathlib import Path

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
from pipelinerl_operator.objects.labels import pod_name

GRPC_PORT = 7000
GENERATOR_PORT = 8000
METRICS_PORT = 9090
RENDEZVOUS_PORT = 29500
"""Of the trainer ranks' own group."""
LOOPBACK = "127.0.0.1"
EVERY_INTERFACE = "0.0.0.0"
TOKEN_KEY = "token"
NATS_KEY = "nats.creds"
NATS_CA_KEY = "nats-ca.crt"

JOB_FILE = Path("/etc/pipelinerl/job/job.yaml")
SECRET_FOLDER = Path("/etc/pipelinerl/secret")


_LISTEN_HOSTS = {Role.TRAINER: "$(PRL_POD_IP)", Role.EVALUATOR: LOOPBACK}
"""Generators are told the trainer's address when a group forms: the pod's own, which no stale DNS
answer can miss. The evaluator's generator serves nobody else.
"""


def generator_port(index: int) -> int:
    """Generators of one actor share its pod's address."""
    return GENERATOR_PORT + index


def host(job: JobResource, role: Role, index: int) -> str:
    """A pod's name in the cluster's DNS; it outlives the pod."""
    return f"{pod_name(job.name, role, index)}.{job.name}.{job.namespace}.svc"


def place(job: JobResource, workload: str) -> tuple[Role, int]:
    """The pod that carries a process of the plan: generators live with their actor, ranks with
    those of their node.
    """
    role, index = role_of(workload), int(workload.rpartition("-")[2])
    if role is Role.GENERATOR:
        return Role.ACTOR, int(workload.split("-")[1])
    if role is Role.TRAINER:
        return role, index // job.spec.trainers.processes_per_node
    return role, index


def port(workload: str) -> int:
    role, index = role_of(workload), int(workload.rpartition("-")[2])
    if role is Role.GENERATOR:
        return generator_port(index)
    return GENERATOR_PORT if role in (Role.REFERENCE, Role.EVALUATOR) else GRPC_PORT


def endpoints(
    job: JobResource, context: OperatorContext, names: tuple[str, ...], output: Path
) -> Endpoints:
    """For the processes `names` of one pod: they find one another on its loopback, the others by
    DNS.
    """
    peers = ("preprocessor-0", *reference_names(job.job), *generator_names(job.job, 0))
    addresses = {name: f"{host(job, *place(job, name))}:{port(name)}" for name in peers}
    addresses |= {name: f"{LOOPBACK}:{port(name)}" for name in names}
    master = LOOPBACK if "trainer-0" in names else host(job, Role.TRAINER, 0)
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
