"""A PipelineRLJob as the API server has it, and the rules for clusters that its settings do not
check.

The CRD's rules say the same.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import (
    API_VERSION,
    KIND,
    Job,
    JobSpec,
    parse_newer_job,
    service_view,
)
from pipelinerl_common.text import counted
from pipelinerl_control.plan import Role, with_actors

_SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def admit(job: Job) -> None:
    """Raises SettingsError that lists every fault for a cluster."""
    if faults := cluster_faults(job):
        lines = "\n".join(f"  {fault}" for fault in faults)
        raise SettingsError(
            f"PipelineRLJob {job.name}: {counted(len(faults), 'fault')} for a cluster\n{lines}"
        )


def cluster_faults(job: Job) -> list[str]:
    """Faults of the job in a cluster, each with the field, its value and the remedy."""
    spec, faults = job.spec, []
    if not _SERVICE_NAME.fullmatch(job.name):
        faults.append(
            f"metadata.name={job.name}: must begin with a letter, as names of Services do; choose "
            "another name"
        )
    if spec.weight_transfer.backend == "nccl" and spec.actors.gpus_per_replica == 0:
        faults.append(
            "spec.weightTransfer.backend=nccl needs GPUs, but spec.actors.gpusPerReplica=0: set "
            "the backend to gloo, "
            "or gpusPerReplica to the GPUs of one actor"
        )
    checkpoint = spec.trainers.checkpoint
    if spec.trainers.replicas > 1 and checkpoint.pvc is None and checkpoint.uri is None:
        faults.append(
            f"spec.trainers.replicas={spec.trainers.replicas} nodes write one checkpoint together: "
            "set "
            "spec.trainers.checkpoint.pvc to a claim that all can mount, or checkpoint.uri to a "
            "folder that all share"
        )
    if spec.evaluation is not None and checkpoint.pvc is None and checkpoint.uri is None:
        faults.append(
            "spec.evaluation reads checkpoints from another pod: set spec.trainers.checkpoint.pvc "
            "to a claim that both can "
            "mount, or checkpoint.uri to a folder that they share"
        )
    return faults


SECTIONS: Mapping[Role, str] = {
    Role.ACTOR: "actors",
    Role.TRAINER: "trainers",
    Role.PREPROCESSOR: "preprocessor",
    Role.REFERENCE: "reference",
    Role.EVALUATOR: "evaluation",
}
"""Section of the spec for each role that has pods."""


def own_image(spec: JobSpec, role: Role) -> str | None:
    """Image of a role as far as the job sets it."""
    section = getattr(spec, SECTIONS[role])
    return (section.image if section is not None else None) or spec.image


def pod_template(spec: JobSpec, role: Role) -> dict[str, Any] | None:
    """The user's template of a role, or None."""
    section = getattr(spec, SECTIONS[role])
    template: dict[str, Any] | None = section.pod_template if section is not None else None
    return template


@dataclass(frozen=True, slots=True)
class JobResource:
    """One version of the resource, with its spec checked."""

    job: Job
    """Name and spec, as `pipelinerl up` would read them from a file."""
    namespace: str
    uid: str
    unknown_fields: tuple[str, ...] = ()
    """Paths of fields that the CRD has and this older operator does not know. They are left out."""

    @property
    def name(self) -> str:
        return self.job.name

    @property
    def spec(self) -> JobSpec:
        return self.job.spec

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> "JobResource":
        """Parses the object. Raises SettingsError that lists every fault of the spec, by the rules
        of the CRD, which a server without CEL does not check.
        """
        metadata = raw["metadata"]
        document = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
            "spec": raw.get("spec", {}),
        }
        job, unknown = parse_newer_job(document, source=f"PipelineRLJob {metadata['name']}")
        admit(job)
        return cls(job, metadata["namespace"], metadata["uid"], unknown)

    def with_actors(self, count: int) -> "JobResource":
        """The same job with another number of actors, within the spec's bounds."""
        return replace(self, job=with_actors(self.job, count))

    def owner_reference(self) -> dict[str, Any]:
        """The entry of `metadata.ownerReferences` of everything that is deleted with the job."""
        return {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }


SCALING = ("replicas", "minReplicas", "maxReplicas")
"""Fields of `actors` that services do not read."""


def service_spec(spec: JobSpec) -> dict[str, Any]:
    """The part of the spec that services read.

    It lacks the number of actors, which changes while services run, and defaults: the job's image
    may be of another release, which lacks fields of this operator.
    """
    view = service_view(spec)
    view.pop("autoscale")
    for field in SCALING:
        view["actors"].pop(field, None)
    return JobSpec.model_validate(view).model_dump(
        mode="json", by_alias=True, exclude_defaults=True
    )
