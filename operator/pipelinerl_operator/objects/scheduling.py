"""Scheduling of a job's pods: node affinity and gang scheduling.

Trainers, preprocessor and the first actors.minReplicas actors are scheduled together or not at all.
No other pod belongs to the gang, or it deadlocks: trainers wait for samples, actors for weights.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from pipelinerl_control.plan import Role, generator_names, num_gpus
from pipelinerl_operator.objects.containers import GPU
from pipelinerl_operator.objects.job_resource import JobResource
from pipelinerl_operator.objects.names import owned, selector


def affinity(
    given: Mapping[str, Any] | None, job: JobResource, excluded_nodes: Sequence[str]
) -> dict[str, Any]:
    """Extends the affinity `given` by the template: the pods of a job prefer one network domain,
    and excluded nodes are not used.
    """
    combined = deepcopy(dict(given or {}))
    if job.spec.scheduling.topology_key is not None:
        _prefer_domain(combined, job, job.spec.scheduling.topology_key)
    if excluded_nodes:
        _exclude(combined, excluded_nodes)
    return combined


def _prefer_domain(combined: dict[str, Any], job: JobResource, key: str) -> None:
    term = {"topologyKey": key, "labelSelector": {"matchLabels": selector(job.name)}}
    preferred = combined.setdefault("podAffinity", {}).setdefault(
        "preferredDuringSchedulingIgnoredDuringExecution", []
    )
    preferred.append({"weight": 100, "podAffinityTerm": term})


def _exclude(combined: dict[str, Any], names: Sequence[str]) -> None:
    """Excludes nodes in every term, since terms are alternatives. A field matches one name."""
    avoid = [
        {"key": "metadata.name", "operator": "NotIn", "values": [name]}
        for name in sorted(set(names))
    ]
    required = combined.setdefault("nodeAffinity", {}).setdefault(
        "requiredDuringSchedulingIgnoredDuringExecution", {}
    )
    terms = required.setdefault("nodeSelectorTerms", []) or [{}]
    required["nodeSelectorTerms"] = [
        {**term, "matchFields": [*term.get("matchFields", []), *avoid]} for term in terms
    ]


COSCHEDULING_LABEL = "scheduling.x-k8s.io/pod-group"
VOLCANO_ANNOTATION = "scheduling.k8s.io/group-name"
SCHEDULERS = {"volcano": "volcano", "coscheduling": "scheduler-plugins-scheduler"}
"""Default names of the installed schedulers."""


def in_gang(job: JobResource, role: Role, index: int) -> bool:
    if job.spec.scheduling.gang.backend == "none":
        return False
    return role in (Role.TRAINER, Role.PREPROCESSOR) or (
        role is Role.ACTOR and index < job.spec.actors.min_replicas
    )


def gang_size(job: JobResource) -> int:
    return job.spec.trainers.replicas + 1 + job.spec.actors.min_replicas


def scheduler_name(job: JobResource) -> str | None:
    """Scheduler of all pods, including actors that do not belong to the gang."""
    scheduling = job.spec.scheduling
    return scheduling.scheduler_name or SCHEDULERS.get(scheduling.gang.backend)


def decoration(job: JobResource, role: Role, index: int) -> dict[str, dict[str, str]]:
    """Labels and annotations that make a pod a member of the gang."""
    if not in_gang(job, role, index):
        return {}
    if job.spec.scheduling.gang.backend == "volcano":
        return {"annotations": {VOLCANO_ANNOTATION: job.name}}
    return {"labels": {COSCHEDULING_LABEL: job.name}}


def pod_group(job: JobResource) -> dict[str, Any] | None:
    """The PodGroup, None without gang scheduling."""
    gang = job.spec.scheduling.gang
    if gang.backend == "none":
        return None
    gpus = _num_gpus(job)
    resources = {"minResources": {GPU: str(gpus)}} if gpus else {}
    size: dict[str, Any] = {"minMember": gang_size(job), **resources}
    if gang.backend == "volcano":
        api_version = "scheduling.volcano.sh/v1beta1"
        optional = {
            "queue": gang.queue,
            "priorityClassName": job.spec.scheduling.priority_class_name,
        }
        spec = {**size, **{name: value for name, value in optional.items() if value}}
    else:
        api_version = "scheduling.x-k8s.io/v1alpha1"
        spec = {**size, "scheduleTimeoutSeconds": gang.timeout_seconds}
    return {**owned(job, api_version, "PodGroup", job.name), "spec": spec}


def _num_gpus(job: JobResource) -> int:
    """GPUs of all members together."""
    spec = job.spec
    of_actor = sum(num_gpus(job.job, name) for name in generator_names(job.job, 0))
    of_trainer = spec.trainers.processes_per_node * num_gpus(job.job, "trainer-0")
    return spec.actors.min_replicas * of_actor + spec.trainers.replicas * of_trainer
