"""Pods of all roles: metadata and pod spec, around containers, volumes and the user's template."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipelinerl_common.settings import JobSpec
from pipelinerl_control.plan import Role
from pipelinerl_operator.objects.containers import GPU, ContainerMaker, limit_threads, pod_security
from pipelinerl_operator.objects.context import OperatorContext
from pipelinerl_operator.objects.job_resource import (
    SECTIONS,
    JobResource,
    pod_template,
    service_spec,
)
from pipelinerl_operator.objects.names import (
    ATTEMPT,
    INDEX,
    ROLE,
    TEMPLATE_HASH,
    owned,
    pod_name,
)
from pipelinerl_operator.objects.scheduling import affinity, decoration, in_gang, scheduler_name
from pipelinerl_operator.objects.template import overlay, template_hash
from pipelinerl_operator.objects.volumes import has_claim, mounts

STOP_MARGIN_S = 30
"""Time between the end of a drain and the kill, to deregister, flush and exit."""
NO_MESH = {"sidecar.istio.io/inject": "false"}
"""Label against a mesh: collectives choose their ports, and a proxy in a job's pod never ends. The
label of a template overrides it.
"""
UNDISTURBED = {
    "karpenter.sh/do-not-disrupt": "true",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
}


@dataclass(frozen=True)
class PodSpec:
    """One pod that should exist. Its manifest is built on request."""

    job: JobResource
    context: OperatorContext
    role: Role
    index: int
    template_hash: str
    """Hash of what the job asks for, independent of the operator's version; also an annotation."""

    @property
    def name(self) -> str:
        return pod_name(self.job.name, self.role, self.index)

    @property
    def main_containers(self) -> tuple[str, ...]:
        """The operator's containers: the pod has failed when one of them has, and has finished when
        the first has. Others are the user's.
        """
        if self.role is Role.ACTOR:
            count = self.job.spec.actors.generators_per_replica
            return ("rollout", *(f"generator-{index}" for index in range(count)))
        return ("generator",) if self.role is Role.REFERENCE else (self.role.value,)

    @property
    def template(self) -> Mapping[str, Any] | None:
        """The user's template, merged into the operator's pod."""
        return pod_template(self.job.spec, self.role)

    def manifest(self, attempt: int, excluded_nodes: Sequence[str] = ()) -> dict[str, Any]:
        """The pod to create. Raises SettingsError when the job's podTemplate does not fit."""
        mine, template = self._own(attempt), self.template
        merged = (
            overlay(mine, template, f"spec.{SECTIONS[self.role]}.podTemplate") if template else mine
        )
        ranks = self.job.spec.trainers.processes_per_node if self.role is Role.TRAINER else 1
        for container in merged["spec"]["containers"]:
            if container["name"] in self.main_containers:
                limit_threads(container, ranks)
        placed = affinity(merged["spec"].get("affinity"), self.job, excluded_nodes)
        if placed:
            merged["spec"]["affinity"] = placed
        return merged

    def _own(self, attempt: int) -> dict[str, Any]:
        job, role = self.job, self.role
        gang = decoration(job, role, self.index)
        own = {ROLE: role.value, INDEX: str(self.index), ATTEMPT: str(attempt)}
        labels = {**NO_MESH, **own, **gang.get("labels", {})}
        undisturbed = UNDISTURBED if role is Role.TRAINER else {}
        annotations = {
            TEMPLATE_HASH: self.template_hash,
            **undisturbed,
            **gang.get("annotations", {}),
        }
        pod = owned(job, "v1", "Pod", self.name, **labels)
        pod["metadata"]["annotations"] = annotations
        return {**pod, "spec": self._pod_spec()}

    def _pod_spec(self) -> dict[str, Any]:
        job, role = self.job, self.role
        containers = ContainerMaker(job, self.context, role, self.index).make()
        secrets = [
            *self.context.image_pull_secrets,
            *(each.name for each in job.spec.image_pull_secrets),
        ]
        optional = {
            "initContainers": list(containers.init),
            "imagePullSecrets": [{"name": name} for name in dict.fromkeys(secrets)],
            "schedulerName": scheduler_name(job),
            "priorityClassName": job.spec.scheduling.priority_class_name,
            "tolerations": [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
            if containers.num_gpus
            else [],
        }
        return {
            "restartPolicy": "Never",
            "hostname": self.name,
            "subdomain": job.name,
            "enableServiceLinks": False,
            "serviceAccountName": job.name,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": math.ceil(_drain_s(job.spec, role)) + STOP_MARGIN_S,
            "securityContext": pod_security(owns_claims=has_claim(job, role)),
            **{name: value for name, value in optional.items() if value},
            "containers": list(containers.main),
            "volumes": [each.volume() for each in mounts(job, role)],
        }


def _drain_s(spec: JobSpec, role: Role) -> float:
    return {Role.ACTOR: spec.actors.drain_seconds, Role.TRAINER: spec.trainers.drain_seconds}.get(
        role, 0.0
    )


def pods(job: JobResource, context: OperatorContext) -> tuple[PodSpec, ...]:
    """All pods of the job in start order."""
    spec = job.spec
    counts = {
        Role.PREPROCESSOR: 1,
        Role.REFERENCE: spec.reference.replicas if spec.reference else 0,
        Role.TRAINER: spec.trainers.replicas,
        Role.ACTOR: spec.actors.replicas,
        Role.EVALUATOR: 1 if spec.evaluation else 0,
    }
    services = service_spec(spec)
    kinds = {
        (role, in_gang(job, role, index))
        for role, count in counts.items()
        for index in range(count)
    }
    hashes = {
        (role, gang): template_hash(job, role, services, in_gang=gang) for role, gang in kinds
    }
    return tuple(
        PodSpec(job, context, role, index, hashes[role, in_gang(job, role, index)])
        for role, count in counts.items()
        for index in range(count)
    )
