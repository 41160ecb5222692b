"""Pods by role, counted for `status`."""

from collections.abc import Sequence

from pipelinerl_control.plan import Role
from pipelinerl_operator.controller.decision import Draft
from pipelinerl_operator.controller.status import RoleStatus
from pipelinerl_operator.controller.units import STATUS_FIELDS, is_of_job
from pipelinerl_operator.controller.views import PodView
from pipelinerl_operator.objects import PodSpec

OPTIONAL = (Role.REFERENCE, Role.EVALUATOR)
"""Roles that a job may do without."""


def count_pods(draft: Draft) -> None:
    """Counts what exists; what should exist, and which templates are old, only where the spec is
    known.
    """
    seen = draft.seen
    own = [pod for pod in seen.pods if is_of_job(pod, seen.job.uid)]
    specs = seen.wanted.desired.pods if seen.wanted is not None else None
    for role, field in STATUS_FIELDS.items():
        old: RoleStatus | None = getattr(draft.status, field)
        pods = [pod for pod in own if pod.role == role]
        wanted = None if specs is None else [spec for spec in specs if spec.role is role]
        if role in OPTIONAL and old is None and not pods and not wanted:
            continue
        draft.set(**{field: _counted(old or RoleStatus(), pods, wanted)})


def _counted(
    old: RoleStatus, pods: Sequence[PodView], specs: Sequence[PodSpec] | None
) -> RoleStatus:
    live = [pod for pod in pods if not pod.is_deleted and not pod.has_ended]
    counts = {
        "created": len(live),
        "scheduled": sum(1 for pod in live if pod.node),
        "ready": sum(1 for pod in live if pod.is_ready),
    }
    if specs is not None:
        hashes = {spec.name: spec.template_hash for spec in specs}
        counts["desired"] = len(specs)
        counts["drifted"] = sum(
            1 for pod in live if hashes.get(pod.key.name, pod.template_hash) != pod.template_hash
        )
    return old.model_copy(update=counts)
