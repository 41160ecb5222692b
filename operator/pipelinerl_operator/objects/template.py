"""The user's podTemplate: merged into the operator's pod, and the hash that detects its changes.

The merge follows the rules of a strategic merge: mappings merge, null removes, some lists merge by
their key, tolerations and similar lists are appended, other lists are replaced. Containers with a
name of ours are changed, others are sidecars. What the operator depends on cannot be changed.

The hash is of what the job says and not of the manifest: an operator of another version, with other
images or another way to write the same pod, computes the same hash.
"""

import hashlib
import json
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from pydantic import BaseModel

from pipelinerl_common.errors import SettingsError
from pipelinerl_control.plan import Role, generator_names, num_gpus
from pipelinerl_operator.objects.containers import RESERVED_PREFIX, workloads_of_pod
from pipelinerl_operator.objects.job_resource import JobResource, own_image, pod_template
from pipelinerl_operator.objects.names import MANAGED_BY, PREFIX
from pipelinerl_operator.objects.scheduling import scheduler_name
from pipelinerl_operator.objects.volumes import (
    CHECKPOINT_ROLES,
    FIXED_FOLDER,
    FIXED_VOLUMES,
    cache_source,
    shared_memory,
)

_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
}
_ADDED = (
    "tolerations",
    "hostAliases",
    "topologySpreadConstraints",
    "envFrom",
    "readinessGates",
    "schedulingGates",
)
_FIXED_IN_POD = ("restartPolicy", "hostname", "subdomain", "enableServiceLinks")
_FIXED_IN_CONTAINER = ("command", "args")


def overlay(pod: Mapping[str, Any], template: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Merges `template` into `pod`. `path` names the template in errors. Raises SettingsError."""
    _check(pod, template, path)
    merged = deepcopy(dict(pod))
    meta = template.get("metadata") or {}
    for part in ("labels", "annotations"):
        merged["metadata"][part] = {**merged["metadata"].get(part, {}), **(meta.get(part) or {})}
    merged["spec"] = _merged(merged["spec"], template.get("spec") or {}, f"{path}.spec")
    return merged


def _merged(base: dict[str, Any], over: Mapping[str, Any], path: str) -> dict[str, Any]:
    for name, value in over.items():
        where = f"{path}.{name}"
        if value is None:
            base.pop(name, None)
        elif name in _KEYS and isinstance(base.get(name), list):
            base[name] = _merged_list(base[name], value, _KEYS[name], where)
        elif name in _ADDED and isinstance(base.get(name), list):
            base[name] = [*base[name], *_list(value, where)]
        elif isinstance(value, dict) and isinstance(base.get(name), dict):
            base[name] = _merged(base[name], value, where)
        else:
            base[name] = deepcopy(value)
    return base


def _merged_list(base: list[Any], over: Any, key: str, path: str) -> list[Any]:
    merged = {item[key]: item for item in base}
    for position, item in enumerate(_list(over, path)):
        if not isinstance(item, dict) or item.get(key) is None:
            raise SettingsError(
                f"{path}[{position}]: has no {key}; items of this list are merged by it"
            )
        merged[item[key]] = _item(merged.get(item[key]), item, path, key)
    return list(merged.values())


def _item(base: dict[str, Any] | None, item: dict[str, Any], path: str, key: str) -> dict[str, Any]:
    """Merges containers; replaces variables, mounts and volumes, whose sources are exclusive."""
    if base is None or not path.endswith(("containers", "initContainers")):
        return deepcopy(item)
    return _merged(base, item, f"{path}[{item[key]}]")


def _list(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise SettingsError(f"{path}: must be a list, not {value!r}")
    return value


def _check(pod: Mapping[str, Any], template: Mapping[str, Any], path: str) -> None:
    for name in sorted(template.keys() - {"metadata", "spec"}):
        raise SettingsError(f"{path}.{name}: a pod template has metadata and spec only")
    _check_metadata(_mapping(template, "metadata", path), f"{path}.metadata")
    _check_spec(pod, _mapping(template, "spec", path), f"{path}.spec")


def _check_metadata(meta: Mapping[str, Any], path: str) -> None:
    for name in sorted(meta.keys() - {"labels", "annotations"}):
        raise SettingsError(f"{path}.{name}: only labels and annotations can be set")
    for part in ("labels", "annotations"):
        for name in _mapping(meta, part, path):
            if name.startswith(PREFIX) or name == MANAGED_BY:
                raise SettingsError(f"{path}.{part}.{name}: is the operator's; choose another name")


def _check_spec(pod: Mapping[str, Any], spec: Mapping[str, Any], path: str) -> None:
    for name in _FIXED_IN_POD:
        if name in spec:
            raise SettingsError(
                f"{path}.{name}: is the operator's ({pod['spec'].get(name)!r}); remove it"
            )
    for volume in _items(spec, "volumes", path):
        if volume.get("name") in FIXED_VOLUMES:
            raise SettingsError(
                f"{path}.volumes[{volume['name']}]: is the operator's; choose another name"
            )
    for kind in ("containers", "initContainers"):
        own = [each["name"] for each in pod["spec"].get(kind, [])]
        for container in _items(spec, kind, path):
            where = f"{path}.{kind}[{container.get('name')}]"
            if container.get("name") in own:
                _check_own_container(container, where)
            _check_ports(container, pod, where)


def _check_own_container(container: Mapping[str, Any], path: str) -> None:
    for name in _FIXED_IN_CONTAINER:
        if name in container:
            raise SettingsError(
                f"{path}.{name}: is the operator's; remove it, or run your command in a sidecar"
            )
    for variable in _items(container, "env", path):
        if str(variable.get("name")).startswith(RESERVED_PREFIX):
            raise SettingsError(
                f"{path}.env[{variable['name']}]: names that begin with {RESERVED_PREFIX} are the "
                "operator's"
            )
    for mount in _items(container, "volumeMounts", path):
        if str(mount.get("mountPath")).startswith(FIXED_FOLDER):
            raise SettingsError(
                f"{path}.volumeMounts[{mount['mountPath']}]: is the operator's; choose another path"
            )


def _check_ports(container: Mapping[str, Any], pod: Mapping[str, Any], path: str) -> None:
    others = [each for each in pod["spec"]["containers"] if each["name"] != container.get("name")]
    taken = {
        entry["containerPort"]: each["name"] for each in others for entry in each.get("ports", [])
    }
    for entry in _items(container, "ports", path):
        if entry.get("containerPort") in taken:
            number = entry["containerPort"]
            raise SettingsError(
                f"{path}.ports: {number} is the port of container {taken[number]}; choose another"
            )


def _items(parent: Mapping[str, Any], name: str, path: str) -> list[Mapping[str, Any]]:
    """The mappings in a list; the API server refuses other items."""
    return [
        each for each in _list(parent.get(name) or [], f"{path}.{name}") if isinstance(each, dict)
    ]


def _mapping(parent: Mapping[str, Any], name: str, path: str) -> Mapping[str, Any]:
    value = parent.get(name)
    if value is not None and not isinstance(value, dict):
        raise SettingsError(f"{path}.{name}: must be a mapping, not {value!r}")
    return value or {}


def template_hash(
    job: JobResource, role: Role, services: Mapping[str, Any], *, in_gang: bool
) -> str:
    """Hash of a role's pods in 16 hexadecimal digits, the same for all indices.

    `services` is the part of the spec that services read, see `service_spec`. Settings at their
    defaults do not count, so that a release which adds a setting changes no hash.
    """
    spec = job.spec
    # Only what the job says: the operator's own defaults may change with its version.
    said: dict[str, Any] = {
        "role": role.value,
        "services": services,
        "image": own_image(spec, role),
        "common": _set(spec, "image_pull_secrets", "env"),
        "network": _set(
            spec.network,
            "interface",
            "nccl_interface",
            *(("rdma",) if _has_gpus(job, role) else ()),
        ),
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


def _set(settings: BaseModel, *names: str) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    return settings.model_dump(mode="json", include=set(names), exclude_defaults=True)
