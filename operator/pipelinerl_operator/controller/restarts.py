"""When a pod has ended, or is being taken away: what happened, whether it counts, and how long to
wait. Pure.

What has failed, what is started again for it, and when the job has failed. Everything is
remembered before it is done.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipelinerl_common.settings import FailurePolicySettings
from pipelinerl_common.text import counted
from pipelinerl_control.plan import ENDING_ROLES, Role
from pipelinerl_operator.controller.decision import Draft, EventType, Wanted
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
    is_of_job,
    unit_of,
)

EXIT_SETTINGS = 2
"""Our services end with it when their input is wrong: starting them again would end the same way.
"""
ENDED_GRACE_S = 60.0
"""A process that ended by itself with status 0 may be ahead of the trainer's end, which is then
still to be seen.
"""


class FailureReason(StrEnum):
    ERROR = "Error"
    OOM_KILLED = "OOMKilled"
    EVICTED = "Evicted"
    PREEMPTED = "Preempted"
    NODE_LOST = "NodeLost"
    DELETED = "Deleted"
    """Somebody deleted the pod."""
    ENDED = "Ended"
    """It ended by itself with status 0 while it was still needed."""
    IMAGE_PULL = "ImagePull"
    """The kubelet keeps trying; a failure only where a rule says so."""


COUNTED = frozenset({FailureReason.ERROR, FailureReason.ENDED})
"""What counts towards maxRestarts unless a rule says otherwise: the rest is the cluster's doing, or
memory's.
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
    """Example: Failure("sums-actor-0", "actor", "node-3", Reason.ERROR, 1, "generator-0: CUDA
    error").
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
    """`fails` ends the job; otherwise something is started again, counted or not."""

    fails: bool
    counted: bool
    by_rule: bool = False


def failure_of(pod: PodView, main: Sequence[str], now: float) -> PodFailure | None:
    """What went wrong with a pod that should be running, or None. A trainer or evaluator that is
    done is no failure.

    `main` are the names of the operator's own containers: a pod never restarts one, so it has failed when one has, even though
    Kubernetes calls it running. Sidecars of users may come and go while it runs.
    """
    disruption = _OF_DISRUPTIONS.get(pod.disruption) or _OF_PODS.get(pod.reason)
    if pod.is_deleted:
        reason = disruption or (
            FailureReason.NODE_LOST if pod.phase == "Unknown" else FailureReason.DELETED
        )
        return PodFailure.of(pod, reason, message=pod.message)
    if pod.phase == "Failed" and disruption is not None:
        return PodFailure.of(pod, disruption, message=pod.message)
    relevant = (
        pod.terminations
        if pod.phase == "Failed"
        else [each for each in pod.terminations if each.container in main]
    )
    if (killed := _first(each for each in relevant if each.reason == "OOMKilled")) is not None:
        return PodFailure.of(
            pod,
            FailureReason.OOM_KILLED,
            killed.exit_code,
            f"{killed.container} used more memory than its limit",
        )
    if (crashed := _first(each for each in relevant if each.exit_code != 0)) is not None:
        return PodFailure.of(
            pod,
            FailureReason.ERROR,
            crashed.exit_code,
            f"{crashed.container}: {crashed.message or crashed.reason}",
        )
    if pod.phase == "Failed":
        return PodFailure.of(pod, FailureReason.ERROR, message=pod.message or pod.reason)
    ended = _first(each for each in pod.terminations if each.container in main)
    if ended is None or pod.role in ENDING_ROLES or now - ended.finished_at < ENDED_GRACE_S:
        return None
    return PodFailure.of(pod, FailureReason.ENDED, 0, f"{ended.container} ended by itself")


def is_ending(pod: PodView, main: Sequence[str]) -> bool:
    """One of its main containers has ended well: either the job is about to, or ENDED_GRACE_S later
    it is a failure.
    """
    return any(each.container in main and each.exit_code == 0 for each in pod.terminations)


def image_pull_of(pod: PodView) -> PodFailure | None:
    """A pod whose image cannot be pulled, so far."""
    reason, message = pod.waiting
    return (
        PodFailure.of(pod, FailureReason.IMAGE_PULL, message=message or reason)
        if reason in _IMAGE_PULL
        else None
    )


def judge(failure: PodFailure, policy: FailurePolicySettings) -> FailureVerdict:
    """The first rule that matches decides, then the defaults.

    Training does not depend on the evaluator: only a rule that names it makes one of its failures
    count.
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
    """Only a rule that names ImagePull makes it a failure: the kubelet goes on trying, and
    deadlines bound it.
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
    """Seconds since the epoch before which `unit` is not started again; it waits twice as long
    after each recent failure.
    """
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
    """Nodes on which pods keep failing while pods of the same job are well on another of the
    `healthy` nodes.

    Without that proof it may as well be the program that fails, and the node the only one there is.
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
            draft.fail(
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
            draft.fail(ConditionReason.RESTART_LIMIT, f"{failure}; {window}")
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
