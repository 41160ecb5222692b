"""The decision about a job: pure, from what is true now. The first step that applies ends it.

```
 managed by another controller, or being deleted -> nothing
 finished                          -> clean up, in the end delete the job
 suspended                         -> delete the pods, then Suspended
 invalid spec                      -> report it, create nothing
 trainer rank 0 ended with 0       -> the last step's evaluation, if there is one; then
                                      Succeeded (remembered now, cleaned up next time)
 past a deadline, out of restarts  -> Failed (likewise)
 otherwise                         -> remember failures, choose the number of actors, create,
                                      replace and remove pods, describe the job
```
"""

from dataclasses import replace

from pipelinerl_control.scaling import look, num_actors
from pipelinerl_operator.controller.decision import Decision, EventType, Observed, Wanted
from pipelinerl_operator.controller.describe import count_pods, describe
from pipelinerl_operator.controller.endings import (
    clean_up,
    end_of_training,
    fail_by_deadline,
    succeed,
    waits_for_evaluation,
)
from pipelinerl_operator.controller.provision import drop_gang, provision, remove_pods
from pipelinerl_operator.controller.restarts import take_failures, take_restart_id
from pipelinerl_operator.controller.status import (
    MAX_MESSAGE_CHARACTERS,
    ConditionReason,
    ConditionType,
    JobPhase,
    write_time,
)
from pipelinerl_operator.objects.pods import pods


def decide(seen: Observed) -> Decision:
    """Returns the decision for `seen`. Total: every observation has one."""
    draft = Decision(seen, seen.before)
    if seen.spec.get("managedBy") or seen.job.is_deleted:
        draft.ignored = True
        return draft
    if seen.wanted is not None:
        _take_num_actors(draft, seen.wanted)
    if draft.status.is_finished:
        clean_up(draft)
        return draft
    draft.set(observed_generation=seen.job.generation)
    # Before deadlines and failures: a suspended job fails neither without pods nor with time.
    if _is_suspended(draft):
        return draft
    is_beginning = draft.status.start_time is None
    if is_beginning:
        draft.set(start_time=write_time(seen.now))
    if seen.wanted is None or draft.seen.wanted is None:
        _refuse(draft)
    elif not _ends(draft, draft.seen.wanted):
        _report_unknown_fields(draft, draft.seen.wanted)
        take_restart_id(draft, draft.seen.wanted, is_beginning=is_beginning)
        wanted = _autoscale(draft, seen.wanted)
        provision(draft, wanted)
        describe(draft, wanted)
    return draft


def _ends(draft: Decision, wanted: Wanted) -> bool:
    if (message := end_of_training(draft, wanted)) is not None:
        if not waits_for_evaluation(draft, wanted):
            succeed(draft, message)
        return True
    return fail_by_deadline(draft) or take_failures(draft, wanted)


def _report_unknown_fields(draft: Decision, wanted: Wanted) -> None:
    """Reports fields that the CRD accepts and this operator does not know: it is the older one."""
    unknown, before = wanted.job.unknown_fields, draft.status.condition(ConditionType.UNDERSTOOD)
    if unknown:
        message = f"left out, since this operator is older than the CRD: {', '.join(unknown)}"
        if before is None or before.message != message[:MAX_MESSAGE_CHARACTERS]:
            draft.note(EventType.WARNING, ConditionReason.UNKNOWN_FIELDS.value, message)
        draft.set_condition(
            ConditionType.UNDERSTOOD, False, ConditionReason.UNKNOWN_FIELDS, message
        )
    elif before is not None:
        draft.set_condition(ConditionType.UNDERSTOOD, True, ConditionReason.ALL_KNOWN)


def _refuse(draft: Decision) -> None:
    """Reports an invalid spec. It changes nothing that runs, since its meaning is unknown."""
    reason, fault = ConditionReason.INVALID_SPEC, draft.seen.fault
    count_pods(draft)
    before = draft.status.condition(ConditionType.PROVISIONED)
    if before is None or before.message != fault[: len(before.message or " ")]:
        draft.note(EventType.WARNING, reason.value, fault)
    draft.set_condition(ConditionType.PROVISIONED, False, reason, fault)
    if draft.seen.own_pods:
        draft.set_condition(ConditionType.DEGRADED, True, reason, "what runs is left as it is")
    else:
        draft.set(phase=JobPhase.INVALID)


# autoscale: status.autoscale holds the number of actors that was chosen since spec.actors.replicas
# was last changed; it is written before the pods follow it


def _take_num_actors(draft: Decision, asked: Wanted) -> Wanted:
    """Replaces the spec's number of actors by the chosen one, and returns the result."""
    count = num_actors(asked.job.spec, draft.status.autoscale)
    wanted = asked
    if count != asked.job.spec.actors.replicas:
        job = asked.job.with_actors(count)
        made = pods(job, asked.desired.pods[0].context)
        wanted = Wanted(job, replace(asked.desired, pods=made))
    draft.seen = replace(draft.seen, wanted=wanted)
    return wanted


def _autoscale(draft: Decision, asked: Wanted) -> Wanted:
    """Evaluates the balance once per period and chooses the number of actors.

    Returns what the spec asks for, with the chosen number of actors.
    """
    spec = asked.job.spec
    if spec.autoscale.enabled:
        training = draft.seen.training or draft.status.training
        step = training.step if training else None
        looked = look(spec, draft.status.autoscale, step, draft.seen.balance)
        if looked is not None:
            draft.set(autoscale=looked.choice)
            if looked.why:
                draft.note(EventType.NORMAL, "Autoscaled", looked.why)
    elif draft.status.autoscale is not None:
        draft.set(autoscale=None)
    return _take_num_actors(draft, asked)


# suspension: atomic; once it began, all pods are deleted whatever happens to the flag meanwhile


def _is_suspended(draft: Decision) -> bool:
    """Takes the next step into, within or out of a suspension. False when the job is to run."""
    asked = draft.seen.spec.get("suspend") is True
    phase = draft.status.phase
    if phase is JobPhase.SUSPENDED and not asked:
        draft.set(phase=JobPhase.PENDING)
        draft.set_condition(ConditionType.SUSPENDED, False, ConditionReason.RESUMED)
        draft.note(EventType.NORMAL, "Resumed", "the job's pods are being created")
        return False
    if not asked and phase is not JobPhase.SUSPENDING:
        return False
    count_pods(draft)
    drop_gang(draft)
    if not draft.seen.own_pods:
        _end_suspending(draft)
        return True
    reason = ConditionReason.SUSPENDING
    if phase is not JobPhase.SUSPENDING:
        draft.set(phase=JobPhase.SUSPENDING)
        draft.note(EventType.NORMAL, "Suspending", "the job's pods are being deleted")
    draft.set_condition(ConditionType.SUSPENDED, False, reason, "pods are being deleted")
    draft.set_condition(ConditionType.RUNNING, False, reason)
    remove_pods(draft, draft.seen.pods)
    return True


def _end_suspending(draft: Decision) -> None:
    reason = ConditionReason.SUSPENDED
    if draft.status.phase is not JobPhase.SUSPENDED:
        draft.note(EventType.NORMAL, "Suspended", "no pod of the job is left")
    draft.set(phase=JobPhase.SUSPENDED, start_time=None, running_time=None, complete_trainers=-1)
    draft.set_condition(ConditionType.SUSPENDED, True, reason)
    for type_ in (
        ConditionType.PROVISIONED,
        ConditionType.RUNNING,
        ConditionType.DEGRADED,
        ConditionType.EVALUATING,
        ConditionType.WEIGHT_GROUP_READY,
    ):
        if draft.status.condition(type_) is not None:
            draft.set_condition(type_, False, reason)
