"""The hash that tells whether a running pod is what its job asks for.

It is of what the job says, not of the manifest: an operator of another version, with other images or another way to write the
same pod, finds no difference.
"""

import hashlib
import json
from typing import Any

from pydantic import BaseModel

from pipelinerl_common.settings import JobSpec
from pipelinerl_operator.objects.config import service_spec
from pipelinerl_operator.plan import Role

_COMMON = ("image", "image_pull_secrets", "env", "network", "shared_memory_size", "restart")
"""Fields of the spec, beside those that services read, that shape every pod."""
_SCHEDULING = ("scheduler_name", "priority_class_name", "topology_key")


def template_hash(spec: JobSpec, role: Role, *, in_gang: bool) -> str:
    """16 hexadecimal digits, equal for pods of a role that differ in nothing but their index.

    Settings at their defaults do not count, so that a release which adds one changes no hash.
    """
    section = _section(spec, role)
    said: dict[str, Any] = {
        "role": role.value,
        "services": _services_read(spec),
        "common": _set(spec, _COMMON),
        "scheduling": _set(spec.scheduling, _SCHEDULING),
        "gang": spec.scheduling.gang.backend if in_gang else "none",
        "section": _set(section, ("image", "pod_template", "startup_timeout_seconds")),
        "cache": _set(spec.model, ("cache",)) if role is not Role.PREPROCESSOR else {},
        "checkpoint": _set(spec.trainers.checkpoint, ("pvc", "uri")) if role is Role.TRAINER else {},
    }
    text = json.dumps(said, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _section(spec: JobSpec, role: Role) -> BaseModel | None:
    sections: dict[Role, BaseModel | None] = {
        Role.ACTOR: spec.actors,
        Role.TRAINER: spec.trainers,
        Role.PREPROCESSOR: spec.preprocessor,
        Role.REFERENCE: spec.reference,
    }
    return sections[role]


def _services_read(spec: JobSpec) -> dict[str, Any]:
    """What is in the job file of the pods, as far as it is not the default."""
    read, chosen = service_spec(spec), spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return _common_part(read, chosen)


def _common_part(read: dict[str, Any], chosen: dict[str, Any]) -> dict[str, Any]:
    part: dict[str, Any] = {}
    for name, value in read.items():
        if name not in chosen:
            continue
        nested = isinstance(value, dict) and isinstance(chosen[name], dict)
        part[name] = _common_part(value, chosen[name]) if nested else value
    return {name: value for name, value in part.items() if value != {}}


def _set(settings: BaseModel | None, names: tuple[str, ...]) -> dict[str, Any]:
    """Those of the fields that differ from their defaults."""
    if settings is None:
        return {}
    return settings.model_dump(mode="json", include=set(names), exclude_defaults=True)
