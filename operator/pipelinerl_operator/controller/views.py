"""The parts of objects that the operator keeps: a pod of 10 kB becomes about 1 kB, a child a few
words.

Texts that all objects of a job share are kept once. All trainers are one unit of restart, since
they share collectives; every other pod is a unit of its own.
"""

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from sys import intern
from typing import Any

from pipelinerl_control.plan import RESTART_SCOPES, RestartScope, Role
from pipelinerl_operator.controller.status import JobStatus, read_time
from pipelinerl_operator.kube import Object, ObjectKey
from pipelinerl_operator.kube.resources import controller_uid, key_of
from pipelinerl_operator.objects import PodSpec
from pipelinerl_operator.objects.names import ATTEMPT, INDEX, JOB, PREFIX, ROLE, TEMPLATE_HASH

APPLIED_HASH = f"{PREFIX}applied-hash"
"""Annotation of a child with the hash of the manifest that the operator applied."""


@dataclass(frozen=True, slots=True)
class JobView:
    """A PipelineRLJob."""

    key: ObjectKey
    uid: str
    resource_version: str
    generation: int
    is_deleted: bool
    phase: str
    """Empty before the first status."""
    document: bytes
    """The object as compressed JSON, about a tenth of its size as dicts, without managedFields and
    kubectl's copy.
    """

    @classmethod
    def of(cls, body: Object) -> "JobView":
        metadata = {
            name: value for name, value in body["metadata"].items() if name != "managedFields"
        }
        annotations = dict(metadata.get("annotations") or {})
        annotations.pop("kubectl.kubernetes.io/last-applied-configuration", None)
        slim = {**body, "metadata": {**metadata, "annotations": annotations}}
        return cls(
            key=key_of(body),
            uid=metadata["uid"],
            resource_version=metadata["resourceVersion"],
            generation=int(metadata.get("generation", 0)),
            is_deleted="deletionTimestamp" in metadata,
            phase=intern((body.get("status") or {}).get("phase", "")),
            document=zlib.compress(json.dumps(slim, separators=(",", ":")).encode(), 1),
        )

    @property
    def body(self) -> Object:
        """The object, parsed at each call: a decision needs it once."""
        body: Object = json.loads(zlib.decompress(self.document))
        return body


@dataclass(frozen=True, slots=True)
class OwnedView:
    """A child of which only metadata is known."""

    key: ObjectKey
    uid: str
    resource_version: str
    generation: int
    """0 for kinds without one."""
    owner_uid: str
    job: str
    applied_hash: str

    @classmethod
    def of(cls, body: Object) -> "OwnedView":
        metadata = body["metadata"]
        return cls(
            key=key_of(body),
            uid=metadata["uid"],
            resource_version=metadata["resourceVersion"],
            generation=int(metadata.get("generation", 0)),
            owner_uid=intern(controller_uid(body)),
            job=intern((metadata.get("labels") or {}).get(JOB, "")),
            applied_hash=(metadata.get("annotations") or {}).get(APPLIED_HASH, ""),
        )

    @property
    def content_version(self) -> str:
        """Changes with what was applied, but not with the status if the kind has a generation."""
        return str(self.generation) if self.generation else self.resource_version


@dataclass(frozen=True, slots=True)
class Termination:
    """A container that has ended."""

    container: str
    exit_code: int
    reason: str
    message: str
    finished_at: float


@dataclass(frozen=True, slots=True)
class PodView:
    """A pod of a job."""

    key: ObjectKey
    uid: str
    resource_version: str
    owner_uid: str
    job: str
    role: str
    index: int
    attempt: int
    template_hash: str
    deleted_at: float | None
    """End of its grace period in seconds since the epoch, once it has been deleted."""
    phase: str
    reason: str
    message: str
    node: str
    ip: str
    is_ready: bool
    scheduling: str
    """Why it has no node yet, as a text for people; empty when it has one."""
    waiting: tuple[str, str]
    """Reason and message of the first waiting container, as ("ImagePullBackOff", "Back-off ...").
    """
    terminations: tuple[Termination, ...]
    disruption: str
    """Reason of its condition DisruptionTarget; empty without it."""

    @classmethod
    def of(cls, body: Object) -> "PodView":
        metadata, status = body["metadata"], body.get("status") or {}
        labels = metadata.get("labels") or {}
        conditions = {each["type"]: each for each in status.get("conditions") or ()}
        containers = [
            *(status.get("initContainerStatuses") or ()),
            *(status.get("containerStatuses") or ()),
        ]
        scheduled = conditions.get("PodScheduled", {})
        disruption = conditions.get("DisruptionTarget", {})
        deleted = metadata.get("deletionTimestamp")
        return cls(
            key=key_of(body),
            uid=metadata["uid"],
            resource_version=metadata["resourceVersion"],
            owner_uid=intern(controller_uid(body)),
            job=intern(labels.get(JOB, "")),
            role=intern(labels.get(ROLE, "")),
            index=_number(labels.get(INDEX)),
            attempt=_number(labels.get(ATTEMPT)),
            template_hash=(metadata.get("annotations") or {}).get(TEMPLATE_HASH, ""),
            deleted_at=read_time(deleted) if deleted else None,
            phase=intern(status.get("phase", "Pending")),
            reason=status.get("reason", ""),
            message=status.get("message", "")[:512],
            node=(body.get("spec") or {}).get("nodeName", ""),
            ip=status.get("podIP", ""),
            is_ready=conditions.get("Ready", {}).get("status") == "True",
            scheduling=scheduled.get("message", "")[:512]
            if scheduled.get("status") == "False"
            else "",
            waiting=_waiting(containers),
            terminations=tuple(_terminations(containers)),
            disruption=disruption.get("reason", "") if disruption.get("status") == "True" else "",
        )

    @property
    def is_deleted(self) -> bool:
        return self.deleted_at is not None

    @property
    def has_ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")


def _number(label: str | None) -> int:
    return int(label) if label is not None and label.isdigit() else -1


def _waiting(containers: Iterable[Mapping[str, Any]]) -> tuple[str, str]:
    for container in containers:
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
            return waiting["reason"], waiting.get("message", "")[:512]
    return "", ""


def _terminations(containers: Iterable[Mapping[str, Any]]) -> Iterable[Termination]:
    for container in containers:
        ended = (container.get("state") or {}).get("terminated")
        if ended:
            yield Termination(
                container["name"],
                int(ended.get("exitCode", 0)),
                ended.get("reason", ""),
                ended.get("message", "")[-1024:],
                read_time(ended["finishedAt"]) if ended.get("finishedAt") else 0.0,
            )


STATUS_FIELDS = {
    Role.ACTOR: "actors",
    Role.TRAINER: "trainers",
    Role.PREPROCESSOR: "preprocessor",
    Role.REFERENCE: "reference",
    Role.EVALUATOR: "evaluator",
}


def unit_of(role: str, index: int) -> str:
    """The unit of restart of a pod: "trainer" for every trainer, "actor-3" for the fourth actor."""
    return role if RESTART_SCOPES[Role(role)] is RestartScope.ROLE else f"{role}-{index}"


def expected_attempt(status: JobStatus, pod: PodSpec | PodView) -> int:
    return status.attempts.get(unit_of(pod.role, pod.index), 0)


def is_of_job(pod: PodView, uid: str) -> bool:
    """Whether the pod belongs to the job with that UID and not to a predecessor of its name."""
    return pod.owner_uid == uid and pod.role in STATUS_FIELDS and pod.index >= 0
