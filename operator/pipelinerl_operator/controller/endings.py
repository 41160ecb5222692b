"""How a job ends, and what is left to do then. The end is remembered first; after it nothing is
ever created again.

Between the end of training and that of the job: the last step's evaluation. The job waits for
it, and never fails by it.

trainer rank 0 ended well -> only the evaluator runs on -> it ended well, or its time is over ->
Succeeded
"""

from dataclasses import replace

from pipelinerl_control.plan import Role, longest_evaluation_s
from pipelinerl_operator.controller.decision import (
    Delete,
    Draft,
    EventType,
    Wanted,
)
from pipelinerl_operator.controller.describe import count_pods
from pipelinerl_operator.controller.provision import drop_gang, provision, remove_pods
from pipelinerl_operator.controller.restarts import take_failures
from pipelinerl_operator.controller.status import (
    ConditionReason,
    ConditionType,
    JobPhase,
    last_training_status,
    read_time,
    write_time,
)
from pipelinerl_operator.controller.views import Termination, expected_attempt, is_of_job
from pipelinerl_operator.kube.resources import JOBS


def end_of_training(draft: Draft, wanted: Wanted) -> str | None:
    """What trainer rank 0, which is in the first trainer pod, left as its message when it ended
    with status 0; else None.
    """
    end = end_of_first(draft, wanted, Role.TRAINER)
    return None if end is None else end.message


def end_of_first(draft: Draft, wanted: Wanted, role: Role) -> Termination | None:
    """How the role's first pod has ended, when it has with status 0. The time is 0 where nobody
    told it.
    """
    first = next(
        (spec for spec in wanted.desired.pods if spec.role is role and spec.index == 0), None
    )
    if first is None:
        return None
    for pod in draft.seen.pods:
        if pod.key.name == first.name and is_of_job(pod, draft.seen.job.uid):
            ended = {each.container: each for each in pod.terminations}
            main = ended.get(first.main_containers[0])
            well = pod.phase == "Succeeded" or (main is not None and main.exit_code == 0)
            if well and pod.attempt >= expected_attempt(draft.status, first):
                return main or Termination(first.main_containers[0], 0, "", "", 0.0)
    return None


def succeed(draft: Draft, message: str) -> None:
    """`message` is the trainer's: the last numbers that were read of it may be many steps old."""
    read = draft.seen.training or draft.status.training
    draft.set(training=last_training_status(message, read) or read)
    draft.end(
        JobPhase.SUCCEEDED,
        ConditionType.SUCCEEDED,
        ConditionReason.TRAINING_FINISHED,
        "trainer rank 0 ended with status 0",
    )
    draft.note(EventType.NORMAL, "Succeeded", "training is finished")


def fail_by_deadline(draft: Draft) -> bool:
    """Deadlines count from startTime, which begins anew after a suspension. True when one has
    passed.
    """
    spec, status, now = draft.seen.spec, draft.status, draft.seen.now
    if status.start_time is None:
        return False
    active_s = now - read_time(status.start_time)
    deadlines = [
        (
            spec.get("activeDeadlineSeconds"),
            ConditionReason.DEADLINE,
            "active for longer than activeDeadlineSeconds",
        )
    ]
    if status.running_time is None:
        waited = "not running within preRunningDeadlineSeconds"
        deadlines.append(
            (spec.get("preRunningDeadlineSeconds"), ConditionReason.PRE_RUNNING_DEADLINE, waited)
        )
    for limit_s, because, message in deadlines:
        if not isinstance(limit_s, int | float):
            continue
        if active_s >= limit_s:
            draft.fail(because, f"{message}={limit_s}")
            return True
        draft.look_again(limit_s - active_s)
    return False


def clean_up(draft: Draft) -> None:
    """Of a finished job: its pods as cleanPodPolicy says, its place in the scheduler's queue, and
    in the end itself.
    """
    spec, status = draft.seen.spec, draft.status
    policy = spec.get("cleanPodPolicy", "Running")
    if policy != "None":
        remove_pods(draft, [pod for pod in draft.seen.pods if policy == "All" or not pod.has_ended])
    drop_gang(draft)
    count_pods(draft)
    ttl_s = spec.get("ttlSecondsAfterFinished")
    if not isinstance(ttl_s, int | float) or status.completion_time is None:
        return
    left_s = read_time(status.completion_time) + ttl_s - draft.seen.now
    if left_s > 0:
        draft.look_again(left_s)
    else:
        draft.actions.append(Delete(JOBS, draft.seen.job.key.name, draft.seen.job.uid))


def waits_for_evaluation(draft: Draft, wanted: Wanted) -> bool:
    """Takes the next step towards it. False when there is nothing to wait for any more."""
    evaluation = wanted.job.spec.evaluation
    if evaluation is None:
        return False
    if (end := end_of_first(draft, wanted, Role.EVALUATOR)) is not None:
        if draft.status.phase is JobPhase.EVALUATING or end.message:
            draft.note(EventType.NORMAL, "Evaluated", end.message or "the last step is evaluated")
        return False
    limit_s = longest_evaluation_s(evaluation)
    deadline = _began(draft, wanted) + limit_s
    if draft.seen.now >= deadline:
        draft.note(
            EventType.WARNING,
            "NotEvaluated",
            f"the evaluation of the last step has not ended within {limit_s:g} s",
        )
        return False
    if draft.status.phase is not JobPhase.EVALUATING:
        draft.set(phase=JobPhase.EVALUATING)
        draft.note(
            EventType.NORMAL, "Evaluating", "training is finished; the last step is evaluated"
        )
    draft.set_condition(
        ConditionType.EVALUATING,
        True,
        ConditionReason.TRAINING_FINISHED,
        f"the last step is evaluated until {write_time(deadline)}",
    )
    draft.look_again(deadline - draft.seen.now)
    if not take_failures(draft, _only(draft, wanted, Role.EVALUATOR)):
        provision(draft, _only(draft, wanted, Role.EVALUATOR, Role.TRAINER))
        count_pods(draft)
    return True


def _began(draft: Draft, wanted: Wanted) -> float:
    """When training ended, as the condition remembers it, or ended again since then."""
    condition = draft.status.condition(ConditionType.EVALUATING)
    holds = condition is not None and condition.status == "True"
    seen = (
        condition.last_transition_time
        if condition is not None and holds
        else write_time(draft.seen.now)
    )
    end = end_of_first(draft, wanted, Role.TRAINER)
    return max(read_time(seen), end.finished_at if end is not None else 0.0)


def _only(draft: Draft, wanted: Wanted, *roles: Role) -> Wanted:
    """Pods of other roles are not needed any more, nor are trainers that are gone."""
    there = {pod.key.name for pod in draft.seen.pods}
    pods = [
        spec
        for spec in wanted.desired.pods
        if spec.role in roles and (spec.role is Role.EVALUATOR or spec.name in there)
    ]
    return replace(wanted, desired=replace(wanted.desired, pods=tuple(pods)))
