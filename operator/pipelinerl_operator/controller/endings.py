"""How a job ends, and what is left to do then. The end is remembered first; after it nothing is
ever created again.
"""

from pipelinerl_control.plan import Role
from pipelinerl_operator.controller.conditions import ConditionReason, ConditionType, set_condition
from pipelinerl_operator.controller.counting import count_pods
from pipelinerl_operator.controller.decision import Delete, Draft, EventType, Wanted
from pipelinerl_operator.controller.removal import drop_gang, remove_pods
from pipelinerl_operator.controller.status import JobPhase, read_time, write_time
from pipelinerl_operator.controller.training import last_training_status
from pipelinerl_operator.controller.units import expected_attempt, is_of_job
from pipelinerl_operator.controller.views import Termination
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
    _end(
        draft,
        JobPhase.SUCCEEDED,
        ConditionType.SUCCEEDED,
        ConditionReason.TRAINING_FINISHED,
        "trainer rank 0 ended with status 0",
    )
    draft.note(EventType.NORMAL, "Succeeded", "training is finished")


def fail(draft: Draft, because: ConditionReason, message: str) -> None:
    _end(draft, JobPhase.FAILED, ConditionType.FAILED, because, message)
    draft.note(EventType.WARNING, because.value, message)


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
            fail(draft, because, f"{message}={limit_s}")
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


def _end(
    draft: Draft, phase: JobPhase, type_: ConditionType, because: ConditionReason, message: str
) -> None:
    draft.set(phase=phase, completion_time=write_time(draft.seen.now))
    set_condition(draft, type_, True, because, message)
    for other in (ConditionType.RUNNING, ConditionType.DEGRADED, ConditionType.EVALUATING):
        if draft.status.holds(other):
            set_condition(draft, other, False, ConditionReason.FINISHED)
