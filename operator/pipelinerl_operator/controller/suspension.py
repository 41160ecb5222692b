"""Suspension is atomic: once begun, everything goes, whatever becomes of the flag meanwhile; only
then is it taken back.
"""

from pipelinerl_operator.controller.conditions import ConditionReason, ConditionType, set_condition
from pipelinerl_operator.controller.counting import count_pods
from pipelinerl_operator.controller.decision import Draft, EventType
from pipelinerl_operator.controller.removal import drop_gang, remove_pods
from pipelinerl_operator.controller.status import JobPhase
from pipelinerl_operator.controller.units import is_of_job


def is_suspended(draft: Draft) -> bool:
    """Takes the next step into, within or out of a suspension. False when the job is to run."""
    asked = draft.seen.spec.get("suspend") is True
    phase = draft.status.phase
    if phase is JobPhase.SUSPENDED and not asked:
        _resume(draft)
        return False
    if not asked and phase is not JobPhase.SUSPENDING:
        return False
    count_pods(draft)
    drop_gang(draft)
    if not any(is_of_job(pod, draft.seen.job.uid) for pod in draft.seen.pods):
        _settle(draft)
        return True
    if phase is not JobPhase.SUSPENDING:
        draft.set(phase=JobPhase.SUSPENDING)
        draft.note(EventType.NORMAL, "Suspending", "the job's pods are being deleted")
    set_condition(
        draft, ConditionType.SUSPENDED, False, ConditionReason.SUSPENDING, "pods are being deleted"
    )
    set_condition(draft, ConditionType.RUNNING, False, ConditionReason.SUSPENDING)
    remove_pods(draft, draft.seen.pods)
    return True


def _settle(draft: Draft) -> None:
    if draft.status.phase is not JobPhase.SUSPENDED:
        draft.note(EventType.NORMAL, "Suspended", "no pod of the job is left")
    draft.set(phase=JobPhase.SUSPENDED, start_time=None, running_time=None, complete_trainers=-1)
    set_condition(draft, ConditionType.SUSPENDED, True, ConditionReason.SUSPENDED)
    for type_ in (
        ConditionType.PROVISIONED,
        ConditionType.RUNNING,
        ConditionType.DEGRADED,
        ConditionType.EVALUATING,
        ConditionType.WEIGHT_GROUP_READY,
    ):
        if draft.status.condition(type_) is not None:
            set_condition(draft, type_, False, ConditionReason.SUSPENDED)


def _resume(draft: Draft) -> None:
    draft.set(phase=JobPhase.PENDING)
    set_condition(draft, ConditionType.SUSPENDED, False, ConditionReason.RESUMED)
    draft.note(EventType.NORMAL, "Resumed", "the job's pods are being created")
