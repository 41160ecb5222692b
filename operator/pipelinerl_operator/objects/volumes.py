"""Volumes of a pod. The root file system is read-only: what is written to is a volume."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelinerl_common.settings import JobSpec
from pipelinerl_control.plan import Role
from pipelinerl_operator.objects.job_resource import JobResource
from pipelinerl_operator.objects.names import JOB_FILE, SECRET_FOLDER, config_name, secret_name

CACHE = Path("/cache")
"""HOME, downloaded and generated models, compiled kernels."""
OUTPUT = Path("/output")
CHECKPOINTS = Path("/checkpoints")
FIXED_FOLDER = "/etc/pipelinerl"
FIXED_VOLUMES = ("job", "secret", "output")
CHECKPOINT_ROLES = (Role.TRAINER, Role.EVALUATOR)
DISABLED_SIZES = ("0", "0Gi", "0Mi")


@dataclass(frozen=True, slots=True)
class Mount:
    """A volume of the pod, mounted at the same path in all of its containers."""

    name: str
    path: Path
    source: dict[str, Any]
    read_only: bool = False

    def volume(self) -> dict[str, Any]:
        return {"name": self.name, **self.source}

    def mount(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "mountPath": str(self.path),
            **({"readOnly": True} if self.read_only else {}),
        }


def output_folder(job: JobResource, role: Role) -> Path:
    """Folder that a role's services write to. For trainers, and for readers of their checkpoints,
    it is on the claim, which outlives the pod.
    """
    checkpoint = job.spec.trainers.checkpoint
    if role not in CHECKPOINT_ROLES:
        return OUTPUT
    if checkpoint.pvc is not None:
        return CHECKPOINTS / job.name
    return Path(checkpoint.uri.removeprefix("file://")) if checkpoint.uri is not None else OUTPUT


def mounts(job: JobResource, role: Role) -> tuple[Mount, ...]:
    spec = job.spec
    own = [
        Mount(
            "job", JOB_FILE.parent, {"configMap": {"name": config_name(job.name)}}, read_only=True
        ),
        Mount(
            "secret",
            SECRET_FOLDER,
            {"secret": {"secretName": secret_name(job.name), "defaultMode": 0o444}},
            read_only=True,
        ),
        Mount("tmp", Path("/tmp"), {"emptyDir": {}}),
        Mount("output", OUTPUT, {"emptyDir": {}}),
        Mount("cache", CACHE, cache_source(spec, role)),
    ]
    if role in CHECKPOINT_ROLES and spec.trainers.checkpoint.pvc is not None:
        claim = {"persistentVolumeClaim": {"claimName": spec.trainers.checkpoint.pvc}}
        own.append(Mount("checkpoints", CHECKPOINTS, claim))
    if (memory := shared_memory(spec, role)) is not None:
        own.append(Mount("shared-memory", Path("/dev/shm"), memory))
    return tuple(own)


def has_claim(job: JobResource, role: Role) -> bool:
    return any("persistentVolumeClaim" in mount.source for mount in mounts(job, role))


def cache_source(spec: JobSpec, role: Role) -> dict[str, Any]:
    cache = spec.model.cache
    if cache is None or role is Role.PREPROCESSOR:
        return {"emptyDir": {}}
    if cache.pvc is not None:
        return {"persistentVolumeClaim": {"claimName": cache.pvc}}
    size = cache.empty_dir.size_limit if cache.empty_dir else None
    return {"emptyDir": {"sizeLimit": size} if size else {}}


def shared_memory(spec: JobSpec, role: Role) -> dict[str, Any] | None:
    """The volume of /dev/shm, or None; the preprocessor does not need it."""
    if role is Role.PREPROCESSOR or spec.shared_memory_size in DISABLED_SIZES:
        return None
    return {"emptyDir": {"medium": "Memory", "sizeLimit": spec.shared_memory_size}}
