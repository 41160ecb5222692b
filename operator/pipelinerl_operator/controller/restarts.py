"""What has failed, what is started again for it, and when the job has failed. Everything is
remembered before it is done.
"""

from collections.abc import Iterable

from pipelinerl_common.text import counted
from pipelinerl_control.plan import ENDING_ROLES, Role
from pipelinerl_operator.controller.conditions import ConditionReason
from pipelinerl_operator.controller.decision import Draft, EventType, Wanted
from pipelinerl_operator.controller.endings import fail
from pipelinerl_operator.controller.failures import (
    COUNTED,
    ENDED_GRACE_S,
    FailureReason,
    PodFailure,
    failure_of,
    image_pull_of,
    is_ending,
    judge,
    pull_verdict,
    within_window,
)
from pipelinerl_operator.controller.status import (
    MAX_FAILURES,
    MAX_MESSAGE_CHARACTERS,
    FailureRecord,
    LastFailure,
    RoleStatus,
    write_time,
)
from pipelinerl_operator.controller.units import STATUS_FIELDS, expected_attempt, is_of_job, unit_of


def take_failures(draft: Draft, wanted: Wanted) -> bool:
    """Remembers every failure that is not remembered yet. True when the job has failed."""
    policy = wanted.job.spec.failure_policy
    for unit, failures in _by_unit(_failures(draft, wanted)).items():
        failure = min(
            failures, key=lambda each: each.reason in COUNTED
        )  # the others' errors follow from what the cluster did
        verdict = (
            pull_verdict(failure, policy)
            if failure.reason is FailureReason.IMAGE_PULL
            else judge(failure, policy)
        )
        if verdict.fails:
            fail(
                draft,
                ConditionReason.FAILURE_RULE if verdict.by_rule else ConditionReason.WRONG_SETTINGS,
                str(failure),
            )
            return True
        recent = within_window(draft.status.recent_failures, policy, draft.seen.now)
        if verdict.counted and sum(each.counted for each in recent) >= policy.max_restarts:
            window = (
                f"used up: {counted(policy.max_restarts, 'restart')} within "
                f"{policy.window_seconds} s"
            )
            fail(draft, ConditionReason.RESTART_LIMIT, f"{failure}; {window}")
            return True
        record = FailureRecord(
            time=write_time(draft.seen.now),
            unit=unit,
            node=failure.node,
            reason=failure.reason.value,
            counted=verdict.counted,
        )
        draft.set(
            recent_failures=[*recent, record][-MAX_FAILURES:], restarts=draft.status.restarts + 1
        )
        _remember(draft, failure)
        _start_again(draft, [unit])
        draft.note(EventType.WARNING, "PodFailed", f"{failure}; {unit} is started again")
    return False


def take_restart_id(draft: Draft, wanted: Wanted, *, is_beginning: bool) -> None:
    """A new restart.id starts everything again."""
    asked = wanted.job.spec.restart.id
    if (draft.status.restart_id or "") == asked:
        return
    draft.set(restart_id=asked or None)
    if is_beginning:  # every pod is new anyway
        return
    _start_again(draft, dict.fromkeys(unit_of(pod.role, pod.index) for pod in wanted.desired.pods))
    draft.note(
        EventType.NORMAL, "Restarting", f"every pod is started again for restart.id {asked!r}"
    )


def _failures(draft: Draft, wanted: Wanted) -> Iterable[tuple[str, PodFailure]]:
    seen, policy = draft.seen, wanted.job.spec.failure_policy
    pods = {pod.key.name: pod for pod in seen.pods if is_of_job(pod, seen.job.uid)}
    for spec in wanted.desired.pods:
        pod = pods.get(spec.name)
        unit, attempt = unit_of(spec.role, spec.index), expected_attempt(draft.status, spec)
        if pod is None:
            was_complete = spec.role is Role.TRAINER and draft.status.complete_trainers == attempt
            if was_complete or seen.gone.get(spec.name) == attempt:
                yield (
                    unit,
                    PodFailure(
                        spec.name, spec.role, "", FailureReason.DELETED, message="the pod is gone"
                    ),
                )
            continue
        if pod.attempt < attempt:
            continue
        if (failure := failure_of(pod, spec.main_containers, seen.now)) is not None:
            yield unit, failure
        elif (pull := image_pull_of(pod)) is not None and pull_verdict(pull, policy).fails:
            yield unit, pull
        elif is_ending(pod, spec.main_containers) and spec.role not in ENDING_ROLES:
            draft.look_again(ENDED_GRACE_S)


def _by_unit(failures: Iterable[tuple[str, PodFailure]]) -> dict[str, list[PodFailure]]:
    units: dict[str, list[PodFailure]] = {}
    for unit, failure in failures:
        units.setdefault(unit, []).append(failure)
    return units


def _remember(draft: Draft, failure: PodFailure) -> None:
    field = STATUS_FIELDS[Role(failure.role)]
    role: RoleStatus = getattr(draft.status, field) or RoleStatus()
    last = LastFailure(
        pod=failure.pod,
        reason=failure.reason.value,
        exit_code=failure.exit_code,
        message=failure.message[:MAX_MESSAGE_CHARACTERS],
        time=write_time(draft.seen.now),
    )
    draft.set(
        **{field: role.model_copy(update={"restarts": role.restarts + 1, "last_failure": last})}
    )


def _start_again(draft: Draft, units: Iterable[str]) -> None:
    attempts = dict(draft.status.attempts)
    for unit in units:
        attempts[unit] = attempts.get(unit, 0) + 1
    draft.set(attempts=attempts)
