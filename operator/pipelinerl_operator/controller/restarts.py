"""Failures of pods, what restarts because of them, and when the job has failed.

What happened to a pod, whether it counts and how long to wait is judged without side effects.
Everything is remembered before it is done.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipelinerl_common.settings import FailurePolicySettings
from pipelinerl_common.text import counted
from pipelinerl_control.plan import ENDING_ROLES, Role
from pipelinerl_operator.controller.decision import Decision, EventType, Wanted
from pipelinerl_operator.controller.status import (
    MAX_FAILURES,
    MAX_MESSAGE_CHARACTERS,
    ConditionReason,
    FailureRecord,
    LastFailure,
    RoleStatus,
    read_time,
    write_time,
)
from pipelinerl_operator.controller.views import (
    STATUS_FIELDS,
    PodView,
    Termination,
    expected_attempt,
    unit_of,
)

EXIT_SETTINGS = 2
"""Exit code of our services for wrong input: a restart would end in the same way."""
ENDED_GRACE_S = 60.0
"""A process that ended with status 0 may only be ahead of the trainer's end, which is observed
later.
"""


class FailureReason(StrEnum):
    """What happened to a pod."""

    ERROR = "Error"
    OOM_KILLED = "OOMKilled"
    EVICTED = "Evicted"
    PREEMPTED = "Preempted"
    NODE_LOST = "NodeLost"
    DELETED = "Deleted"
    """The pod was deleted by others than the operator."""
    ENDED = "Ended"
    """The process ended with status 0 while it was still needed."""
    IMAGE_PULL = "ImagePull"
    """The kubelet retries; a failure only where a rule says so."""


COUNTED = frozenset({FailureReason.ERROR, FailureReason.ENDED})
"""Reasons that count towards maxRestarts unless a rule says otherwise; the others are caused by the
cluster or by memory limits.
"""

_OF_PODS = {
    "Evicted": FailureReason.EVICTED,
    "NodeLost": FailureReason.NODE_LOST,
    "NodeShutdown": FailureReason.NODE_LOST,
    "Shutdown": FailureReason.NODE_LOST,
    "Terminated": FailureReason.NODE_LOST,
    "Preempting": FailureReason.PREEMPTED,
    "Preempted": FailureReason.PREEMPTED,
    "UnexpectedAdmissionError": FailureReason.EVICTED,
    "NodeAffinity": FailureReason.EVICTED,
    "OutOfcpu": FailureReason.EVICTED,
    "OutOfmemory": FailureReason.EVICTED,
    "OutOfpods": FailureReason.EVICTED,
}
_OF_DISRUPTIONS = {
    "PreemptionByScheduler": FailureReason.PREEMPTED,
    "PreemptionByKubeScheduler": FailureReason.PREEMPTED,
    "DeletionByTaintManager": FailureReason.NODE_LOST,
    "DeletionByPodGC": FailureReason.NODE_LOST,
    "EvictionByEvictionAPI": FailureReason.EVICTED,
    "TerminationByKubelet": FailureReason.EVICTED,
}
_BLAME_THE_NODE = frozenset({FailureReason.ERROR, FailureReason.NODE_LOST, FailureReason.ENDED})
_IMAGE_PULL = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "RegistryUnavailable",
    }
)


@dataclass(frozen=True, slots=True)
class PodFailure:
    """A failure of a pod.

    Example: PodFailure("sums-actor-0", "actor", "node-3", FailureReason.ERROR, 1, "CUDA error").
    """

    pod: str
    role: str
    node: str
    reason: FailureReason
    exit_code: int | None = None
    message: str = ""

    @classmethod
    def of(
        cls, pod: PodView, reason: FailureReason, exit_code: int | None = None, message: str = ""
    ) -> "PodFailure":
        return cls(pod.key.name, pod.role, pod.node, reason, exit_code, message)

    def __str__(self) -> str:
        code = f", exit code {self.exit_code}" if self.exit_code is not None else ""
        return f"{self.pod}: {self.reason}{code}{f': {self.message}' if self.message else ''}"


@dataclass(frozen=True, slots=True)
class FailureVerdict:
    """The judgement of a failure: it ends the job, or something restarts, counted or not."""

    fails: bool
    counted: bool
    by_rule: bool = False


def failure_of(pod: PodView, main: Sequence[str], now: float) -> PodFailure | None:
    """What went wrong with a pod that should be running; None also for a finished trainer or
    evaluator.

    `main` names the operator's own containers. No container of a pod is ever restarted, so the pod
    has failed when one of them has, even while Kubernetes calls it running. Sidecars of users may
    end while it runs.
    """
    disruption = _OF_DISRUPTIONS.get(pod.disruption) or _OF_PODS.get(pod.reason)
    if pod.is_deleted:
        lost = pod.phase == "Unknown"
        reason = disruption or (FailureReason.NODE_LOST if lost else FailureReason.DELETED)
        return PodFailure.of(pod, reason, message=pod.message)
    has_failed = pod.phase == "Failed"
    if has_failed and disruption is not None:
        return PodFailure.of(pod, disruption, message=pod.message)
    # In a failed pod a sidecar may be the cause, in a running one it may simply have ended.
    ends = [each for each in pod.terminations if has_failed or each.container in main]
    if (end := _first(each for each in ends if each.reason == "OOMKilled")) is not None:
        message = f"{end.container} used more memory than its limit"
        return PodFailure.of(pod, FailureReason.OOM_KILLED, end.exit_code, message)
    if (end := _first(each for each in ends if each.exit_code != 0)) is not None:
        message = f"{end.container}: {end.message or end.reason}"
        return PodFailure.of(pod, FailureReason.ERROR, end.exit_code, message)
    if has_failed:
        return PodFailure.of(pod, FailureReason.ERROR, message=pod.message or pod.reason)
    end = _first(each for each in pod.terminations if each.container in main)
    if end is None or pod.role in ENDING_ROLES or now - end.finished_at < ENDED_GRACE_S:
        return None
    return PodFailure.of(pod, FailureReason.ENDED, 0, f"{end.container} ended by itself")


def is_ending(pod: PodView, main: Sequence[str]) -> bool:
    """Whether a main container ended with status 0: the job ends soon, or it is a failure after
    ENDED_GRACE_S.
    """
    return any(each.container in main and each.exit_code == 0 for each in pod.terminations)


def image_pull_of(pod: PodView) -> PodFailure | None:
    """The failure of a pod whose image cannot be pulled so far, or None."""
    reason, message = pod.waiting
    if reason not in _IMAGE_PULL:
        return None
    return PodFailure.of(pod, FailureReason.IMAGE_PULL, message=message or reason)


def judge(failure: PodFailure, policy: FailurePolicySettings) -> FailureVerdict:
    """Judges a failure by the first rule that matches, else by the defaults.

    Training does not depend on the evaluator: its failures count only where a rule names it.
    """
    is_evaluators = failure.role == Role.EVALUATOR
    for rule in policy.rules:
        fits_role = rule.role == failure.role or (rule.role is None and not is_evaluators)
        fits_code = not rule.exit_codes or failure.exit_code in rule.exit_codes
        fits_reason = not rule.reasons or failure.reason.value in rule.reasons
        if fits_role and fits_code and fits_reason:
            return FailureVerdict(
                fails=rule.action == "FailJob", counted=rule.action == "Restart", by_rule=True
            )
    wrong_settings = failure.reason is FailureReason.ERROR and failure.exit_code == EXIT_SETTINGS
    return FailureVerdict(
        fails=wrong_settings and not is_evaluators,
        counted=failure.reason in COUNTED and not is_evaluators,
    )


def pull_verdict(failure: PodFailure, policy: FailurePolicySettings) -> FailureVerdict:
    """Judges an image that cannot be pulled: only a rule that names ImagePull makes it a failure,
    because the kubelet keeps retrying and deadlines bound it.
    """
    naming = [rule for rule in policy.rules if "ImagePull" in rule.reasons]
    return judge(failure, policy.model_copy(update={"rules": naming}))


def within_window(
    failures: Iterable[FailureRecord], policy: FailurePolicySettings, now: float
) -> list[FailureRecord]:
    return [each for each in failures if now - read_time(each.time) <= policy.window_seconds]


def start_again_at(
    unit: str, failures: Sequence[FailureRecord], policy: FailurePolicySettings
) -> float:
    """Time before which `unit` is not restarted: the delay doubles with each recent failure."""
    own = [each for each in failures if each.unit == unit]
    if not own:
        return 0.0
    backoff = policy.backoff
    return read_time(own[-1].time) + min(
        backoff.max_seconds, backoff.initial_seconds * 2.0 ** min(len(own) - 1, 30)
    )


def excluded_nodes(
    failures: Iterable[FailureRecord], policy: FailurePolicySettings, healthy: Collection[str]
) -> tuple[str, ...]:
    """Nodes on which pods keep failing while pods of the job run well on another, `healthy` node.

    Without such a node, the program may be the cause, and the node the only one there is.
    """
    if policy.exclude_node_after == 0:
        return ()
    blamed = Counter(each.node for each in failures if each.node and each.reason in _BLAME_THE_NODE)
    return tuple(
        sorted(
            node
            for node, count in blamed.items()
            if count >= policy.exclude_node_after and set(healthy) - set(blamed)
        )
    )


def _first(terminations: Iterable[Termination]) -> Termination | None:
    return min(terminations, key=lambda each: each.finished_at, default=None)


def take_failures(draft: Decision, wanted: Wanted) -> bool:
    """Remembers every failure that is not remembered yet. True when the job has failed."""
    policy = wanted.job.spec.failure_policy
    for unit, failures in _by_unit(_failures(draft, wanted)).items():
        # What the cluster did comes first: errors of the other pods follow from it.
        failure = min(failures, key=lambda each: each.reason in COUNTED)
        is_pull = failure.reason is FailureReason.IMAGE_PULL
        verdict = pull_verdict(failure, policy) if is_pull else judge(failure, policy)
        if verdict.fails:
            by_rule = verdict.by_rule
            reason = ConditionReason.FAILURE_RULE if by_rule else ConditionReason.WRONG_SETTINGS
            draft.fail(reason, str(failure))
            return True
        recent = within_window(draft.status.recent_failures, policy, draft.seen.now)
        if verdict.counted and sum(each.counted for each in recent) >= policy.max_restarts:
            used = f"{counted(policy.max_restarts, 'restart')} within {policy.window_seconds} s"
            draft.fail(ConditionReason.RESTART_LIMIT, f"{failure}; used up: {used}")
            return True
        record = FailureRecord(
            time=write_time(draft.seen.now),
            unit=unit,
            node=failure.node,
            reason=failure.reason.value,
            counted=verdict.counted,
        )
        remembered = [*recent, record][-MAX_FAILURES:]
        draft.set(recent_failures=remembered, restarts=draft.status.restarts + 1)
        _remember(draft, failure)
        _start_again(draft, [unit])
        draft.note(EventType.WARNING, "PodFailed", f"{failure}; {unit} is started again")
    return False


def take_restart_id(draft: Decision, wanted: Wanted, *, is_beginning: bool) -> None:
    """Restarts every pod for a new restart.id."""
    asked = wanted.job.spec.restart.id
    if (draft.status.restart_id or "") == asked:
        return
    draft.set(restart_id=asked or None)
    if is_beginning:  # every pod is new anyway
        return
    _start_again(draft, dict.fromkeys(unit_of(pod.role, pod.index) for pod in wanted.desired.pods))
    message = f"every pod is started again for restart.id {asked!r}"
    draft.note(EventType.NORMAL, "Restarting", message)


def _failures(draft: Decision, wanted: Wanted) -> Iterable[tuple[str, PodFailure]]:
    seen, policy = draft.seen, wanted.job.spec.failure_policy
    pods = {pod.key.name: pod for pod in seen.own_pods}
    for spec in wanted.desired.pods:
        pod = pods.get(spec.name)
        unit, attempt = unit_of(spec.role, spec.index), expected_attempt(draft.status, spec)
        if pod is None:
            was_complete = spec.role is Role.TRAINER and draft.status.complete_trainers == attempt
            if was_complete or seen.gone.get(spec.name) == attempt:
                reason, message = FailureReason.DELETED, "the pod is gone"
                yield unit, PodFailure(spec.name, spec.role, "", reason, message=message)
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


def _remember(draft: Decision, failure: PodFailure) -> None:
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


def _start_again(draft: Decision, units: Iterable[str]) -> None:
    attempts = dict(draft.status.attempts)
    for unit in units:
        attempts[unit] = attempts.get(unit, 0) + 1
    draft.set(attempts=attempts)
