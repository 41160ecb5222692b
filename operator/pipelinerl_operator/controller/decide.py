"""`autoscale` in the life of a job.

```
 spec.actors.replicas   where it begins, and begins again whenever somebody changes it
 status.autoscale       what was chosen since; written before it is acted on
```

Suspension is atomic: once begun, everything goes, whatever becomes of the flag meanwhile; only
then is it taken back.

The decision: pure, from what is true now. The first step that settles the matter ends it.

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

from dataclasses import replace

from pipelinerl_control.scaling import look, num_actors
from pipelinerl_operator.controller.decision import (
    Decision,
    Draft,
    EventType,
    Observed,
    Wanted,
)
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
from pipelinerl_operator.controller.views import is_of_job
from pipelinerl_operator.objects.pods import pods


def take_choice(draft: Draft) -> None:
    """From here on the job has as many actors as were chosen."""
    wanted = draft.seen.wanted
    if wanted is not None:
        count = num_actors(wanted.job.spec, draft.status.autoscale)
        draft.seen = replace(draft.seen, wanted=_with_actors(wanted, count))


def autoscale(draft: Draft, asked: Wanted) -> Wanted:
    """Looks at the balance once a period, and chooses. What the spec asks for, with as many actors
    as are chosen then.
    """
    spec = asked.job.spec
    if spec.autoscale.enabled:
        training = draft.seen.training or draft.status.training
        looked = look(
            spec, draft.status.autoscale, training.step if training else None, draft.seen.balance
        )
        if looked is not None:
            draft.set(autoscale=looked.choice)
            if looked.why:
                draft.note(EventType.NORMAL, "Autoscaled", looked.why)
    elif draft.status.autoscale is not None:
        draft.set(autoscale=None)
    wanted = _with_actors(asked, num_actors(spec, draft.status.autoscale))
    draft.seen = replace(draft.seen, wanted=wanted)
    return wanted


def _with_actors(wanted: Wanted, count: int) -> Wanted:
    if count == wanted.job.spec.actors.replicas:
        return wanted
    job = wanted.job.with_actors(count)
    return Wanted(job, replace(wanted.desired, pods=pods(job, wanted.desired.pods[0].context)))


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
    draft.set_condition(
        ConditionType.SUSPENDED, False, ConditionReason.SUSPENDING, "pods are being deleted"
    )
    draft.set_condition(ConditionType.RUNNING, False, ConditionReason.SUSPENDING)
    remove_pods(draft, draft.seen.pods)
    return True


def _settle(draft: Draft) -> None:
    if draft.status.phase is not JobPhase.SUSPENDED:
        draft.note(EventType.NORMAL, "Suspended", "no pod of the job is left")
    draft.set(phase=JobPhase.SUSPENDED, start_time=None, running_time=None, complete_trainers=-1)
    draft.set_condition(ConditionType.SUSPENDED, True, ConditionReason.SUSPENDED)
    for type_ in (
        ConditionType.PROVISIONED,
        ConditionType.RUNNING,
        ConditionType.DEGRADED,
        ConditionType.EVALUATING,
        ConditionType.WEIGHT_GROUP_READY,
    ):
        if draft.status.condition(type_) is not None:
            draft.set_condition(type_, False, ConditionReason.SUSPENDED)


def _resume(draft: Draft) -> None:
    draft.set(phase=JobPhase.PENDING)
    draft.set_condition(ConditionType.SUSPENDED, False, ConditionReason.RESUMED)
    draft.note(EventType.NORMAL, "Resumed", "the job's pods are being created")


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
        draft.set_condition(
            ConditionType.UNDERSTOOD, False, ConditionReason.UNKNOWN_FIELDS, message
        )
    elif before is not None:
        draft.set_condition(ConditionType.UNDERSTOOD, True, ConditionReason.ALL_KNOWN)


def _refuse(draft: Draft) -> None:
    """An invalid spec changes nothing that runs: there is no telling what it would mean."""
    count_pods(draft)
    before = draft.status.condition(ConditionType.PROVISIONED)
    if before is None or before.message != draft.seen.fault[: len(before.message or " ")]:
        draft.note(EventType.WARNING, ConditionReason.INVALID_SPEC.value, draft.seen.fault)
    draft.set_condition(
        ConditionType.PROVISIONED, False, ConditionReason.INVALID_SPEC, draft.seen.fault
    )
    if any(is_of_job(pod, draft.seen.job.uid) for pod in draft.seen.pods):
        draft.set_condition(
            ConditionType.DEGRADED,
            True,
            ConditionReason.INVALID_SPEC,
            "what runs is left as it is",
        )
    else:
        draft.set(phase=JobPhase.INVALID)
