"""The decision: pure, from what is true now. The first step that settles the matter ends it.

```
 somebody else's, or being deleted -> nothing
 finished                          -> clean up, in the end delete the job
 suspended                         -> pods away, then Suspended
 invalid spec                      -> say so, create nothing
 trainer rank 0 ended well         -> the last step's evaluation, where there is one; then
                                      Succeeded (remembered now, cleaned up next time)
 past a deadline, out of restarts  -> Failed (likewise)
 otherwise                         -> remember failures, choose how many actors, create, replace and remove, describe
```
"""

from pipelinerl_operator.controller.autoscale import autoscale, take_choice
from pipelinerl_operator.controller.conditions import ConditionReason, ConditionType, set_condition
from pipelinerl_operator.controller.counting import count_pods
from pipelinerl_operator.controller.decision import Decision, Draft, EventType, Observed, Wanted
from pipelinerl_operator.controller.describing import describe
from pipelinerl_operator.controller.endings import (
    clean_up,
    end_of_training,
    fail_by_deadline,
    succeed,
)
from pipelinerl_operator.controller.last_evaluation import waits_for_evaluation
from pipelinerl_operator.controller.provisioning import provision
from pipelinerl_operator.controller.restarts import take_failures, take_restart_id
from pipelinerl_operator.controller.status import MAX_MESSAGE_CHARACTERS, JobPhase, write_time
from pipelinerl_operator.controller.suspension import is_suspended
from pipelinerl_operator.controller.units import is_of_job


def decide(seen: Observed) -> Decision:
    """Total: every observation has a decision."""
    draft = Draft(seen, seen.before)
    if seen.spec.get("managedBy") or seen.job.is_deleted:
        return Decision(draft.status, ignored=True)
    take_choice(draft)
    if draft.status.is_finished:
        clean_up(draft)
        return draft.done()
    draft.set(observed_generation=seen.job.generation)
    if is_suspended(draft):
        return draft.done()
    is_beginning = draft.status.start_time is None
    if is_beginning:
        draft.set(start_time=write_time(seen.now))
    if seen.wanted is None or draft.seen.wanted is None:
        _refuse(draft)
    elif not _ends(draft, draft.seen.wanted):
        _tell_unknown_fields(draft, draft.seen.wanted)
        take_restart_id(draft, draft.seen.wanted, is_beginning=is_beginning)
        wanted = autoscale(draft, seen.wanted)
        provision(draft, wanted)
        describe(draft, wanted)
    return draft.done()


def _ends(draft: Draft, wanted: Wanted) -> bool:
    if (message := end_of_training(draft, wanted)) is not None:
        if not waits_for_evaluation(draft, wanted):
            succeed(draft, message)
        return True
    return fail_by_deadline(draft) or take_failures(draft, wanted)


def _tell_unknown_fields(draft: Draft, wanted: Wanted) -> None:
    """The CRD lets only fields of its own through: one that is unknown here is newer than this
    operator.
    """
    unknown, before = wanted.job.unknown_fields, draft.status.condition(ConditionType.UNDERSTOOD)
    if unknown:
        message = f"left out, since this operator is older than the CRD: {', '.join(unknown)}"
        if before is None or before.message != message[:MAX_MESSAGE_CHARACTERS]:
            draft.note(EventType.WARNING, ConditionReason.UNKNOWN_FIELDS.value, message)
        set_condition(
            draft, ConditionType.UNDERSTOOD, False, ConditionReason.UNKNOWN_FIELDS, message
        )
    elif before is not None:
        set_condition(draft, ConditionType.UNDERSTOOD, True, ConditionReason.ALL_KNOWN)


def _refuse(draft: Draft) -> None:
    """An invalid spec changes nothing that runs: there is no telling what it would mean."""
    count_pods(draft)
    before = draft.status.condition(ConditionType.PROVISIONED)
    if before is None or before.message != draft.seen.fault[: len(before.message or " ")]:
        draft.note(EventType.WARNING, ConditionReason.INVALID_SPEC.value, draft.seen.fault)
    set_condition(
        draft, ConditionType.PROVISIONED, False, ConditionReason.INVALID_SPEC, draft.seen.fault
    )
    if any(is_of_job(pod, draft.seen.job.uid) for pod in draft.seen.pods):
        set_condition(
            draft,
            ConditionType.DEGRADED,
            True,
            ConditionReason.INVALID_SPEC,
            "what runs is left as it is",
        )
    else:
        draft.set(phase=JobPhase.INVALID)
