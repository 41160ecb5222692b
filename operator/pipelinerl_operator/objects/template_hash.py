"""The hash that tells whether a running pod is what its job asks for.

It is of what the job says, not of the manifest: an operator of another version, with other images
or another way to write the same pod, finds no difference.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from pipelinerl_common.settings import JobSpec
from pipelinerl_control.plan import Role, generator_names, num_gpus
from pipelinerl_operator.objects.containers import own_image, workloads_of_pod
from pipelinerl_operator.objects.gang import scheduler_name
from pipelinerl_operator.objects.job_resource import JobResource
from pipelinerl_operator.objects.volumes import CHECKPOINT_ROLES, cache_source, shared_memory


def template_hash(
    job: JobResource, role: Role, services: Mapping[str, Any], *, in_gang: bool
) -> str:
    """16 hexadecimal digits, equal for pods of a role that differ in nothing but their index and
    the gang.

    `services` is what services read of the spec, see `service_spec`.

    Settings at their defaults do not count, so that a release which adds one changes no hash.
    """
    spec = job.spec
    said: dict[str, Any] = {
        "role": role.value,
        "services": services,
        "image": own_image(spec, role),
        "common": _set(spec, "image_pull_secrets", "env"),
        "network": _set(spec.network, "interface", *(("rdma",) if _has_gpus(job, role) else ())),
        "scheduling": [
            scheduler_name(job),
            _set(spec.scheduling, "priority_class_name", "topology_key"),
        ],
        "gang": spec.scheduling.gang.backend if in_gang else None,
        "template": pod_template(spec, role),
        "cache": cache_source(spec, role),
        "memory": shared_memory(spec, role),
        "checkpoint": _set(spec.trainers.checkpoint, "pvc", "uri")
        if role in CHECKPOINT_ROLES
        else {},
        "reference": _set(spec.reference, "startup_timeout_seconds")
        if role is Role.REFERENCE and spec.reference
        else {},
    }
    text = json.dumps(said, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _has_gpus(job: JobResource, role: Role) -> bool:
    names = workloads_of_pod(job.spec, role, 0, generator_names(job.job, 0))
    return any(num_gpus(job.job, name) for name in names)


def pod_template(spec: JobSpec, role: Role) -> dict[str, Any] | None:
    sections = {
        Role.ACTOR: spec.actors,
        Role.TRAINER: spec.trainers,
        Role.PREPROCESSOR: spec.preprocessor,
        Role.REFERENCE: spec.reference,
        Role.EVALUATOR: spec.evaluation,
    }
    section = sections[role]
    return section.pod_template if section is not None else None


def _set(settings: BaseModel, *names: str) -> dict[str, Any]:
    """Those of the fields that differ from their defaults."""
    return settings.model_dump(mode="json", include=set(names), exclude_defaults=True)
