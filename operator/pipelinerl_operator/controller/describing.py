"""Conditions and phase of a job that is under way."""

from pipelinerl_control.plan import Role
from pipelinerl_operator.controller.conditions import ConditionReason, ConditionType, set_condition
from pipelinerl_operator.controller.counting import count_pods
from pipelinerl_operator.controller.decision import Draft, EventType, Wanted
from pipelinerl_operator.controller.failures import image_pull_of, start_again_at
from pipelinerl_operator.controller.status import JobPhase, RoleStatus, write_time
from pipelinerl_operator.controller.units import STATUS_FIELDS, is_of_job, unit_of
from pipelinerl_operator.controller.views import PodView
from pipelinerl_operator.objects.labels import selector


def describe(draft: Draft, wanted: Wanted) -> None:
    count_pods(draft)
    own = [pod for pod in draft.seen.pods if is_of_job(pod, draft.seen.job.uid)]
    labels = selector(wanted.job.name, Role.ACTOR)
    draft.set(actor_selector=",".join(f"{key}={value}" for key, value in labels.items()))
    _describe_provisioning(draft, own)
    _describe_weight_group(draft)
    _describe_running(draft, wanted)
    _describe_degradation(draft, wanted)
    if draft.status.holds(
        ConditionType.EVALUATING
    ):  # a trainer that was done is gone, and trains again from its last checkpoint
        set_condition(draft, ConditionType.EVALUATING, False, ConditionReason.RESTARTING)
    if draft.seen.stream is not None:
        draft.set(stream=draft.seen.stream)
    if draft.seen.training is not None:
        draft.set(training=draft.seen.training)
    draft.set(phase=_phase(draft, own))


def _describe_provisioning(draft: Draft, own: list[PodView]) -> None:
    missing = [
        f"{field} {role.created} of {role.desired}"
        for field, role in _roles(draft)
        if role.created < role.desired
    ]
    unscheduled = next((pod for pod in own if pod.scheduling), None)
    pull = next((each for each in map(image_pull_of, own) if each is not None), None)
    waiting = next((pod for pod in own if pod.waiting[0]), None)
    if draft.seen.refusal:
        set_condition(
            draft, ConditionType.PROVISIONED, False, ConditionReason.POD_REFUSED, draft.seen.refusal
        )
    elif missing and draft.seen.stream_fault:
        set_condition(
            draft,
            ConditionType.PROVISIONED,
            False,
            ConditionReason.STREAM_UNAVAILABLE,
            draft.seen.stream_fault,
        )
    elif missing:
        set_condition(
            draft, ConditionType.PROVISIONED, False, ConditionReason.CREATING, ", ".join(missing)
        )
    elif unscheduled is not None:
        set_condition(
            draft,
            ConditionType.PROVISIONED,
            False,
            ConditionReason.NOT_SCHEDULED,
            f"{unscheduled.key.name}: {unscheduled.scheduling}",
        )
    elif pull is not None:
        set_condition(
            draft,
            ConditionType.PROVISIONED,
            False,
            ConditionReason.IMAGE_PULL,
            f"{pull.pod}: {pull.message}",
        )
    elif waiting is not None:
        set_condition(
            draft,
            ConditionType.PROVISIONED,
            False,
            ConditionReason.CONTAINER_WAITING,
            f"{waiting.key.name}: {': '.join(waiting.waiting)}",
        )
    else:
        set_condition(draft, ConditionType.PROVISIONED, True, ConditionReason.ALL_CREATED)


def _describe_weight_group(draft: Draft) -> None:
    group = draft.seen.weight_group
    if (
        group is None
    ):  # no coordinator yet, for example of a leader that has just begun: what is known stays
        if draft.status.condition(ConditionType.WEIGHT_GROUP_READY) is None:
            set_condition(
                draft,
                ConditionType.WEIGHT_GROUP_READY,
                False,
                ConditionReason.FORMING,
                "waiting for the trainer and the generators",
            )
        return
    draft.set(weight_group=group)
    if group.num_members:
        set_condition(
            draft,
            ConditionType.WEIGHT_GROUP_READY,
            True,
            ConditionReason.FORMED,
            f"epoch {group.epoch}, world size {group.world_size}",
        )
    else:
        set_condition(
            draft, ConditionType.WEIGHT_GROUP_READY, False, ConditionReason.FORMING, group.state
        )


def _describe_running(draft: Draft, wanted: Wanted) -> None:
    status, spec = draft.status, wanted.job.spec
    needed = {
        "trainers": spec.trainers.replicas,
        "preprocessor": 1,
        "actors": min(spec.actors.min_replicas, spec.actors.replicas),
        **({"reference": spec.reference.replicas} if spec.reference else {}),
    }
    ready = {field: role.ready for field, role in _roles(draft)}
    short = [
        f"{field} {ready.get(field, 0)} of {count}"
        for field, count in needed.items()
        if ready.get(field, 0) < count
    ]
    if short:
        set_condition(
            draft,
            ConditionType.RUNNING,
            False,
            ConditionReason.STARTING,
            f"ready: {', '.join(short)}",
        )
        return
    if status.running_time is None:
        draft.set(running_time=write_time(draft.seen.now))
        draft.note(EventType.NORMAL, "Running", "every role is running")
    set_condition(draft, ConditionType.RUNNING, True, ConditionReason.ALL_READY)


def _describe_degradation(draft: Draft, wanted: Wanted) -> None:
    if (
        draft.status.running_time is None
        and draft.status.condition(ConditionType.DEGRADED) is None
        and not draft.status.attempts
    ):
        return
    policy, now = wanted.job.spec.failure_policy, draft.seen.now
    failures = draft.status.recent_failures
    units = dict.fromkeys(unit_of(pod.role, pod.index) for pod in wanted.desired.pods)
    waiting = [unit for unit in units if start_again_at(unit, failures, policy) > now]
    short = [
        f"{field} {role.ready} of {role.desired}"
        for field, role in _roles(draft)
        if role.ready < role.desired
    ]
    if waiting:
        set_condition(
            draft,
            ConditionType.DEGRADED,
            True,
            ConditionReason.BACKING_OFF,
            f"started again after a pause: {', '.join(waiting[:8])}",
        )
    elif short:
        set_condition(
            draft,
            ConditionType.DEGRADED,
            True,
            ConditionReason.RESTARTING,
            f"ready: {', '.join(short)}",
        )
    else:
        set_condition(draft, ConditionType.DEGRADED, False, ConditionReason.AS_IT_SHOULD_BE)


def _roles(draft: Draft) -> list[tuple[str, RoleStatus]]:
    roles = [(field, getattr(draft.status, field)) for field in STATUS_FIELDS.values()]
    return [(field, role) for field, role in roles if role is not None]


def _phase(draft: Draft, own: list[PodView]) -> JobPhase:
    if draft.status.holds(ConditionType.RUNNING):
        return JobPhase.RUNNING
    if draft.seen.refusal and not own:
        return JobPhase.INVALID
    return JobPhase.RECOVERING if draft.status.running_time is not None else JobPhase.PENDING
