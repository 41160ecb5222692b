"""Names and labels of everything that belongs to a job."""

from typing import Any

from pipelinerl_control.plan import Role
from pipelinerl_operator.objects.job_resource import JobResource

MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "pipelinerl-operator"
PREFIX = "pipelinerl.dev/"
JOB, ROLE, INDEX, ATTEMPT = (f"{PREFIX}{word}" for word in ("job", "role", "index", "attempt"))
TEMPLATE_HASH = f"{PREFIX}template-hash"
"""Annotation of a pod: what it was made from."""

POD_ROLES = (Role.PREPROCESSOR, Role.REFERENCE, Role.TRAINER, Role.ACTOR, Role.EVALUATOR)


def pod_name(job: str, role: Role, index: int) -> str:
    return f"{job}-{role.value}-{index}"


def secret_name(job: str) -> str:
    return f"{job}-token"


def config_name(job: str) -> str:
    return f"{job}-job"


def job_labels(job: str) -> dict[str, str]:
    """On everything; with them the operator finds a job's objects."""
    return {MANAGED_BY: MANAGER, JOB: job}


def selector(job: str, role: Role | None = None) -> dict[str, str]:
    """Of a job's pods."""
    return {JOB: job, **({ROLE: role.value} if role else {})}


def metadata(job: JobResource, name: str, **labels: str) -> dict[str, Any]:
    """Of an object that the job owns."""
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": {**job_labels(job.name), **labels},
        "ownerReferences": [job.owner_reference()],
    }
