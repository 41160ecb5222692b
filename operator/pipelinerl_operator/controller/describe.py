"""What `status` says about a job: pods counted by role, conditions and phase."""

from collections.abc import Sequence

from pipelinerl_control.plan import Role
from pipelinerl_operator.controller.decision import Decision, EventType, Wanted
from pipelinerl_operator.controller.restarts import image_pull_of, start_again_at
from pipelinerl_operator.controller.status import (
    ConditionReason,
    ConditionType,
    JobPhase,
    RoleStatus,
    write_time,
)
from pipelinerl_operator.controller.views import STATUS_FIELDS, PodView, unit_of
from pipelinerl_operator.objects import PodSpec
from pipelinerl_operator.objects.names import selector

OPTIONAL = (Role.REFERENCE, Role.EVALUATOR)
"""Roles that a job need not have."""


def count_pods(draft: Decision) -> None:
    """Counts the pods that exist by role; what should exist, and which templates are old, only
    where the spec is known.
    """
    seen = draft.seen
    own = seen.own_pods
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


def describe(draft: Decision, wanted: Wanted) -> None:
    """Sets counts, conditions and phase of a job that is not finished."""
    count_pods(draft)
    labels = selector(wanted.job.name, Role.ACTOR)
    draft.set(actor_selector=",".join(f"{key}={value}" for key, value in labels.items()))
    reason, message = _provisioning(draft, draft.seen.own_pods)
    draft.set_condition(
        ConditionType.PROVISIONED, reason is ConditionReason.ALL_CREATED, reason, message
    )
    _describe_weight_group(draft)
    _describe_running(draft, wanted)
    _describe_degradation(draft, wanted)
    if draft.status.holds(ConditionType.EVALUATING):
        # A trainer that had finished is gone: training continues from the last checkpoint.
        draft.set_condition(ConditionType.EVALUATING, False, ConditionReason.RESTARTING)
    if draft.seen.stream is not None:
        draft.set(stream=draft.seen.stream)
    if draft.seen.training is not None:
        draft.set(training=draft.seen.training)
    draft.set(phase=_phase(draft))


def _provisioning(draft: Decision, own: Sequence[PodView]) -> tuple[ConditionReason, str]:
    """Reason and message of the condition Provisioned: the first of what is missing."""
    missing = [
        f"{field} {role.created} of {role.desired}"
        for field, role in _roles(draft)
        if role.created < role.desired
    ]
    if draft.seen.refusal:
        return ConditionReason.POD_REFUSED, draft.seen.refusal
    if missing and draft.seen.stream_fault:
        return ConditionReason.STREAM_UNAVAILABLE, draft.seen.stream_fault
    if missing:
        return ConditionReason.CREATING, ", ".join(missing)
    if (pod := next((pod for pod in own if pod.scheduling), None)) is not None:
        return ConditionReason.NOT_SCHEDULED, f"{pod.key.name}: {pod.scheduling}"
    pulls = (failure for failure in map(image_pull_of, own) if failure is not None)
    if (pull := next(pulls, None)) is not None:
        return ConditionReason.IMAGE_PULL, f"{pull.pod}: {pull.message}"
    if (pod := next((pod for pod in own if pod.waiting[0]), None)) is not None:
        return ConditionReason.CONTAINER_WAITING, f"{pod.key.name}: {': '.join(pod.waiting)}"
    return ConditionReason.ALL_CREATED, ""


def _describe_weight_group(draft: Decision) -> None:
    type_, group = ConditionType.WEIGHT_GROUP_READY, draft.seen.weight_group
    if group is None:
        # No coordinator yet, for example of a new leader: what is known stays.
        if draft.status.condition(type_) is None:
            message = "waiting for the trainer and the generators"
            draft.set_condition(type_, False, ConditionReason.FORMING, message)
        return
    draft.set(weight_group=group)
    if group.num_members:
        message = f"epoch {group.epoch}, world size {group.world_size}"
        draft.set_condition(type_, True, ConditionReason.FORMED, message)
    else:
        draft.set_condition(type_, False, ConditionReason.FORMING, group.state)


def _describe_running(draft: Decision, wanted: Wanted) -> None:
    spec = wanted.job.spec
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
        message = f"ready: {', '.join(short)}"
        draft.set_condition(ConditionType.RUNNING, False, ConditionReason.STARTING, message)
        return
    if draft.status.running_time is None:
        draft.set(running_time=write_time(draft.seen.now))
        draft.note(EventType.NORMAL, "Running", "every role is running")
    draft.set_condition(ConditionType.RUNNING, True, ConditionReason.ALL_READY)


def _describe_degradation(draft: Decision, wanted: Wanted) -> None:
    type_, status = ConditionType.DEGRADED, draft.status
    if status.running_time is None and status.condition(type_) is None and not status.attempts:
        return
    policy, now = wanted.job.spec.failure_policy, draft.seen.now
    units = dict.fromkeys(unit_of(pod.role, pod.index) for pod in wanted.desired.pods)
    waiting = [unit for unit in units if start_again_at(unit, status.recent_failures, policy) > now]
    short = [
        f"{field} {role.ready} of {role.desired}"
        for field, role in _roles(draft)
        if role.ready < role.desired
    ]
    if waiting:
        message = f"started again after a pause: {', '.join(waiting[:8])}"
        draft.set_condition(type_, True, ConditionReason.BACKING_OFF, message)
    elif short:
        message = f"ready: {', '.join(short)}"
        draft.set_condition(type_, True, ConditionReason.RESTARTING, message)
    else:
        draft.set_condition(type_, False, ConditionReason.AS_IT_SHOULD_BE)


def _roles(draft: Decision) -> list[tuple[str, RoleStatus]]:
    roles = [(field, getattr(draft.status, field)) for field in STATUS_FIELDS.values()]
    return [(field, role) for field, role in roles if role is not None]


def _phase(draft: Decision) -> JobPhase:
    if draft.status.holds(ConditionType.RUNNING):
        return JobPhase.RUNNING
    if draft.seen.refusal and not draft.seen.own_pods:
        return JobPhase.INVALID
    return JobPhase.RECOVERING if draft.status.running_time is not None else JobPhase.PENDING
