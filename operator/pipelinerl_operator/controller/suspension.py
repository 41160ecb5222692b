"""Suspension is atomic: once begun, everything goes, whatever becomes of the flag meanwhile; only
then is it taken back.
"""

from pipelinerl_operator.controller.conditions import Because, Type, say
from pipelinerl_operator.controller.counting import count_pods
from pipelinerl_operator.controller.decision import Draft, EventType
from pipelinerl_operator.controller.removal import drop_gang, remove_pods
from pipelinerl_operator.controller.status import Phase
from pipelinerl_operator.controller.units import is_of_job


def is_suspended(draft: Draft) -> bool:
    """Takes the next step into, within or out of a suspension. False when the job is to run."""
    asked = draft.seen.spec.get("suspend") is True
    phase = draft.status.phase
    if phase is Phase.SUSPENDED and not asked:
        _resume(draft)
        return False
    if not asked and phase is not Phase.SUSPENDING:
        return False
    count_pods(draft)
    drop_gang(draft)
    if not any(is_of_job(pod, draft.seen.job.uid) for pod in draft.seen.pods):
        _settle(draft)
        return True
    if phase is not Phase.SUSPENDING:
        draft.set(phase=Phase.SUSPENDING)
        draft.note(EventType.NORMAL, "Suspending", "the job's pods are being deleted")
    say(draft, Type.SUSPENDED, False, Because.SUSPENDING, "pods are being deleted")
    say(draft, Type.RUNNING, False, Because.SUSPENDING)
    remove_pods(draft, draft.seen.pods)
    return True


def _settle(draft: Draft) -> None:
    if draft.status.phase is not Phase.SUSPENDED:
        draft.note(EventType.NORMAL, "Suspended", "no pod of the job is left")
    draft.set(phase=Phase.SUSPENDED, start_time=None, running_time=None, complete_trainers=-1)
    say(draft, Type.SUSPENDED, True, Because.SUSPENDED)
    for type_ in (
        Type.PROVISIONED,
        Type.RUNNING,
        Type.DEGRADED,
        Type.EVALUATING,
        Type.WEIGHT_GROUP_READY,
    ):
        if draft.status.condition(type_) is not None:
            say(draft, type_, False, Because.SUSPENDED)


def _resume(draft: Draft) -> None:
    draft.set(phase=Phase.PENDING)
    say(draft, Type.SUSPENDED, False, Because.RESUMED)
    draft.note(EventType.NORMAL, "Resumed", "the job's pods are being created")
