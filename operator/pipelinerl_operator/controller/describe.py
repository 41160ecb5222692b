"""Pods by role, counted for `status`.

Conditions and phase of a job that is under way.
"""

from collections.abc import Sequence

from pipelinerl_control.plan import Role
from pipelinerl_operator.controller.decision import Draft, EventType, Wanted
from pipelinerl_operator.controller.restarts import image_pull_of, start_again_at
from pipelinerl_operator.controller.status import (
    ConditionReason,
    ConditionType,
    JobPhase,
    RoleStatus,
    write_time,
)
from pipelinerl_operator.controller.views import STATUS_FIELDS, PodView, is_of_job, unit_of
from pipelinerl_operator.objects import PodSpec
from pipelinerl_operator.objects.names import selector

OPTIONAL = (Role.REFERENCE, Role.EVALUATOR)
"""Roles that a job may do without."""


def count_pods(draft: Draft) -> None:
    """Counts what exists; what should exist, and which templates are old, only where the spec is
    known.
    """
    seen = draft.seen
    own = [pod for pod in seen.pods if is_of_job(pod, seen.job.uid)]
    specs = seen.wanted.desired.pods if seen.wanted is not None else None
    for role, field in STATUS_FIELDS.items():
        old: RoleStatus | None = getattr(draft.status, field)
        pods = [pod for pod in own if pod.role == role]
        wanted = None if specs is None else [spec for spec in specs if spec.role is role]
        if role in OPTIONAL and old is None and not pods and not wanted:
            continue
        draft.set(**{field: _counted(old or RoleStatus(), pods, wanted)})


def _counted(
    old: RoleStatus, pods: Sequence[PodView], specs: Sequence[PodSpec] | None
) -> RoleStatus:
    live = [pod for pod in pods if not pod.is_deleted and not pod.has_ended]
    counts = {
        "created": len(live),
        "scheduled": sum(1 for pod in live if pod.node),
        "ready": sum(1 for pod in live if pod.is_ready),
    }
    if specs is not None:
        hashes = {spec.name: spec.template_hash for spec in specs}
        counts["desired"] = len(specs)
        counts["drifted"] = sum(
            1 for pod in live if hashes.get(pod.key.name, pod.template_hash) != pod.template_hash
        )
    return old.model_copy(update=counts)


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
        draft.set_condition(ConditionType.EVALUATING, False, ConditionReason.RESTARTING)
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
        draft.set_condition(
            ConditionType.PROVISIONED, False, ConditionReason.POD_REFUSED, draft.seen.refusal
        )
    elif missing and draft.seen.stream_fault:
        draft.set_condition(
            ConditionType.PROVISIONED,
            False,
            ConditionReason.STREAM_UNAVAILABLE,
            draft.seen.stream_fault,
        )
    elif missing:
        draft.set_condition(
            ConditionType.PROVISIONED, False, ConditionReason.CREATING, ", ".join(missing)
        )
    elif unscheduled is not None:
        draft.set_condition(
            ConditionType.PROVISIONED,
            False,
            ConditionReason.NOT_SCHEDULED,
            f"{unscheduled.key.name}: {unscheduled.scheduling}",
        )
    elif pull is not None:
        draft.set_condition(
            ConditionType.PROVISIONED,
            False,
            ConditionReason.IMAGE_PULL,
            f"{pull.pod}: {pull.message}",
        )
    elif waiting is not None:
        draft.set_condition(
            ConditionType.PROVISIONED,
            False,
            ConditionReason.CONTAINER_WAITING,
            f"{waiting.key.name}: {': '.join(waiting.waiting)}",
        )
    else:
        draft.set_condition(ConditionType.PROVISIONED, True, ConditionReason.ALL_CREATED)


def _describe_weight_group(draft: Draft) -> None:
    group = draft.seen.weight_group
    if (
        group is None
    ):  # no coordinator yet, for example of a leader that has just begun: what is known stays
        if draft.status.condition(ConditionType.WEIGHT_GROUP_READY) is None:
            draft.set_condition(
                ConditionType.WEIGHT_GROUP_READY,
                False,
                ConditionReason.FORMING,
                "waiting for the trainer and the generators",
            )
        return
    draft.set(weight_group=group)
    if group.num_members:
        draft.set_condition(
            ConditionType.WEIGHT_GROUP_READY,
            True,
            ConditionReason.FORMED,
            f"epoch {group.epoch}, world size {group.world_size}",
        )
    else:
        draft.set_condition(
            ConditionType.WEIGHT_GROUP_READY, False, ConditionReason.FORMING, group.state
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
        draft.set_condition(
            ConditionType.RUNNING,
            False,
            ConditionReason.STARTING,
            f"ready: {', '.join(short)}",
        )
        return
    if status.running_time is None:
        draft.set(running_time=write_time(draft.seen.now))
        draft.note(EventType.NORMAL, "Running", "every role is running")
    draft.set_condition(ConditionType.RUNNING, True, ConditionReason.ALL_READY)


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
        draft.set_condition(
            ConditionType.DEGRADED,
            True,
            ConditionReason.BACKING_OFF,
            f"started again after a pause: {', '.join(waiting[:8])}",
        )
    elif short:
        draft.set_condition(
            ConditionType.DEGRADED,
            True,
            ConditionReason.RESTARTING,
            f"ready: {', '.join(short)}",
        )
    else:
        draft.set_condition(ConditionType.DEGRADED, False, ConditionReason.AS_IT_SHOULD_BE)


def _roles(draft: Draft) -> list[tuple[str, RoleStatus]]:
    roles = [(field, getattr(draft.status, field)) for field in STATUS_FIELDS.values()]
    return [(field, role) for field, role in roles if role is not None]


def _phase(draft: Draft, own: list[PodView]) -> JobPhase:
    if draft.status.holds(ConditionType.RUNNING):
        return JobPhase.RUNNING
    if draft.seen.refusal and not own:
        return JobPhase.INVALID
    return JobPhase.RECOVERING if draft.status.running_time is not None else JobPhase.PENDING
