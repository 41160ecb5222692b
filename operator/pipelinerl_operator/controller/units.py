"""Units of restart: what starts again together. All trainers are one, since they share collectives;
others are alone.
"""

from pipelinerl_control.plan import RESTART_SCOPES, RestartScope, Role
from pipelinerl_operator.controller.status import JobStatus
from pipelinerl_operator.controller.views import PodView
from pipelinerl_operator.objects import PodSpec

STATUS_FIELDS = {
    Role.ACTOR: "actors",
    Role.TRAINER: "trainers",
    Role.PREPROCESSOR: "preprocessor",
    Role.REFERENCE: "reference",
    Role.EVALUATOR: "evaluator",
}


def unit_of(role: str, index: int) -> str:
    """Example: "trainer" for every trainer, "actor-3" for the fourth actor."""
    return role if RESTART_SCOPES[Role(role)] is RestartScope.ROLE else f"{role}-{index}"


def expected_attempt(status: JobStatus, pod: PodSpec | PodView) -> int:
    return status.attempts.get(unit_of(pod.role, pod.index), 0)


def is_of_job(pod: PodView, uid: str) -> bool:
    """By UID, never by name: a predecessor's pods may still be around."""
    return pod.owner_uid == uid and pod.role in STATUS_FIELDS and pod.index >= 0
