"""The end of a job and the clean-up after it.

The end is remembered first; after it nothing is ever created again. Before it, the job waits for
the last step's evaluation, and never fails because of it:

```
 trainer rank 0 ended with 0 -> only the evaluator runs -> it ended with 0, or its time is over
                             -> Succeeded
```
"""

from dataclasses import replace

from pipelinerl_control.plan import Role, longest_evaluation_s
from pipelinerl_operator.controller.decision import Decision, Delete, EventType, Wanted
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
from pipelinerl_operator.controller.views import Termination, expected_attempt
from pipelinerl_operator.kube.resources import JOBS


def end_of_training(draft: Decision, wanted: Wanted) -> str | None:
    """The message that trainer rank 0, in the first trainer pod, left when it ended with status 0;
    else None.
    """
    end = _end_of_first(draft, wanted, Role.TRAINER)
    return None if end is None else end.message


def _end_of_first(draft: Decision, wanted: Wanted, role: Role) -> Termination | None:
    """The end of the role's first pod, if with status 0. Its time is 0 where it is unknown."""
    first = next(
        (spec for spec in wanted.desired.pods if (spec.role, spec.index) == (role, 0)), None
    )
    if first is None:
        return None
    for pod in draft.seen.own_pods:
        if pod.key.name == first.name and pod.attempt >= expected_attempt(draft.status, first):
            ended = {each.container: each for each in pod.terminations}
            main = ended.get(first.main_containers[0])
            if pod.phase == "Succeeded" or (main is not None and main.exit_code == 0):
                return main or Termination(first.main_containers[0], 0, "", "", 0.0)
    return None


def succeed(draft: Decision, message: str) -> None:
    """Ends the job. `message` is the trainer's: the numbers that were read last may be old."""
    read = draft.seen.training or draft.status.training
    draft.set(training=last_training_status(message, read) or read)
    draft.end(
        JobPhase.SUCCEEDED,
        ConditionType.SUCCEEDED,
        ConditionReason.TRAINING_FINISHED,
        "trainer rank 0 ended with status 0",
    )
    draft.note(EventType.NORMAL, "Succeeded", "training is finished")


def fail_by_deadline(draft: Decision) -> bool:
    """Fails the job when a deadline has passed, and returns whether one has.

    Deadlines count from startTime, which is set again after a suspension.
    """
    spec, status, now = draft.seen.spec, draft.status, draft.seen.now
    if status.start_time is None:
        return False
    active_s = now - read_time(status.start_time)
    active = ("activeDeadlineSeconds", ConditionReason.DEADLINE, "active for longer than ")
    waiting = (
        "preRunningDeadlineSeconds",
        ConditionReason.PRE_RUNNING_DEADLINE,
        "not running within ",
    )
    for field, reason, message in (active, waiting) if status.running_time is None else (active,):
        limit_s = spec.get(field)
        if not isinstance(limit_s, int | float):
            continue
        if active_s >= limit_s:
            draft.fail(reason, f"{message}{field}={limit_s}")
            return True
        draft.look_again(limit_s - active_s)
    return False


def clean_up(draft: Decision) -> None:
    """Cleans up after a finished job: its pods as cleanPodPolicy says, its place in the scheduler's
    queue, and in the end the job itself.
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


# the last step's evaluation


def waits_for_evaluation(draft: Decision, wanted: Wanted) -> bool:
    """Takes the next step towards the last evaluation. False when there is none to wait for."""
    evaluation = wanted.job.spec.evaluation
    if evaluation is None:
        return False
    is_evaluating = draft.status.phase is JobPhase.EVALUATING
    if (end := _end_of_first(draft, wanted, Role.EVALUATOR)) is not None:
        if is_evaluating or end.message:
            draft.note(EventType.NORMAL, "Evaluated", end.message or "the last step is evaluated")
        return False
    # The wait is bounded: an evaluator that hangs must not keep a trained job from succeeding.
    limit_s = longest_evaluation_s(evaluation)
    deadline = _end_of_training_at(draft, wanted) + limit_s
    if draft.seen.now >= deadline:
        message = f"the evaluation of the last step has not ended within {limit_s:g} s"
        draft.note(EventType.WARNING, "NotEvaluated", message)
        return False
    if not is_evaluating:
        draft.set(phase=JobPhase.EVALUATING)
        message = "training is finished; the last step is evaluated"
        draft.note(EventType.NORMAL, "Evaluating", message)
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


def _end_of_training_at(draft: Decision, wanted: Wanted) -> float:
    """When training ended: as the condition remembers it, or later when it ended again."""
    condition, seen_at = draft.status.condition(ConditionType.EVALUATING), draft.seen.now
    if condition is not None and condition.status == "True":
        seen_at = read_time(condition.last_transition_time)
    end = _end_of_first(draft, wanted, Role.TRAINER)
    return max(float(int(seen_at)), end.finished_at if end is not None else 0.0)


def _only(draft: Decision, wanted: Wanted, *roles: Role) -> Wanted:
    """`wanted` with the pods of `roles` only; trainers only as far as they still exist."""
    there = {pod.key.name for pod in draft.seen.pods}
    pods = tuple(
        spec
        for spec in wanted.desired.pods
        if spec.role in roles and (spec.role is Role.EVALUATOR or spec.name in there)
    )
    return replace(wanted, desired=replace(wanted.desired, pods=pods))
