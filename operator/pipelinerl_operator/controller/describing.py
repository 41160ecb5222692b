"""Conditions and phase of a job that is under way."""

from pipelinerl_control.plan import Role
from pipelinerl_operator.controller.conditions import Because, Type, say
from pipelinerl_operator.controller.counting import count_pods
from pipelinerl_operator.controller.decision import Draft, EventType, Wanted
from pipelinerl_operator.controller.failures import image_pull_of, start_again_at
from pipelinerl_operator.controller.status import Phase, RoleStatus, write_time
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
        Type.EVALUATING
    ):  # a trainer that was done is gone, and trains again from its last checkpoint
        say(draft, Type.EVALUATING, False, Because.RESTARTING)
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
        say(draft, Type.PROVISIONED, False, Because.POD_REFUSED, draft.seen.refusal)
    elif missing and draft.seen.stream_fault:
        say(draft, Type.PROVISIONED, False, Because.STREAM_UNAVAILABLE, draft.seen.stream_fault)
    elif missing:
        say(draft, Type.PROVISIONED, False, Because.CREATING, ", ".join(missing))
    elif unscheduled is not None:
        say(
            draft,
            Type.PROVISIONED,
            False,
            Because.NOT_SCHEDULED,
            f"{unscheduled.key.name}: {unscheduled.scheduling}",
        )
    elif pull is not None:
        say(draft, Type.PROVISIONED, False, Because.IMAGE_PULL, f"{pull.pod}: {pull.message}")
    elif waiting is not None:
        say(
            draft,
            Type.PROVISIONED,
            False,
            Because.CONTAINER_WAITING,
            f"{waiting.key.name}: {': '.join(waiting.waiting)}",
        )
    else:
        say(draft, Type.PROVISIONED, True, Because.ALL_CREATED)


def _describe_weight_group(draft: Draft) -> None:
    group = draft.seen.weight_group
    if (
        group is None
    ):  # no coordinator yet, for example of a leader that has just begun: what is known stays
        if draft.status.condition(Type.WEIGHT_GROUP_READY) is None:
            say(
                draft,
                Type.WEIGHT_GROUP_READY,
                False,
                Because.FORMING,
                "waiting for the trainer and the generators",
            )
        return
    draft.set(weight_group=group)
    if group.num_members:
        say(
            draft,
            Type.WEIGHT_GROUP_READY,
            True,
            Because.FORMED,
            f"epoch {group.epoch}, world size {group.world_size}",
        )
    else:
        say(draft, Type.WEIGHT_GROUP_READY, False, Because.FORMING, group.state)


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
        say(draft, Type.RUNNING, False, Because.STARTING, f"ready: {', '.join(short)}")
        return
    if status.running_time is None:
        draft.set(running_time=write_time(draft.seen.now))
        draft.note(EventType.NORMAL, "Running", "every role is running")
    say(draft, Type.RUNNING, True, Because.ALL_READY)


def _describe_degradation(draft: Draft, wanted: Wanted) -> None:
    if (
        draft.status.running_time is None
        and draft.status.condition(Type.DEGRADED) is None
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
        say(
            draft,
            Type.DEGRADED,
            True,
            Because.BACKING_OFF,
            f"started again after a pause: {', '.join(waiting[:8])}",
        )
    elif short:
        say(draft, Type.DEGRADED, True, Because.RESTARTING, f"ready: {', '.join(short)}")
    else:
        say(draft, Type.DEGRADED, False, Because.AS_IT_SHOULD_BE)


def _roles(draft: Draft) -> list[tuple[str, RoleStatus]]:
    roles = [(field, getattr(draft.status, field)) for field in STATUS_FIELDS.values()]
    return [(field, role) for field, role in roles if role is not None]


def _phase(draft: Draft, own: list[PodView]) -> Phase:
    if draft.status.holds(Type.RUNNING):
        return Phase.RUNNING
    if draft.seen.refusal and not own:
        return Phase.INVALID
    return Phase.RECOVERING if draft.status.running_time is not None else Phase.PENDING
