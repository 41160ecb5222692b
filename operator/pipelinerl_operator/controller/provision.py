"""What is created, replaced and removed so that the cluster holds what the job asks for."""

import hashlib
import json
from collections.abc import Iterable

from pipelinerl_control.plan import Role
from pipelinerl_operator.controller.decision import (
    Apply,
    CheckTemplates,
    CreatePod,
    Decision,
    Delete,
    EventType,
    MakeSecret,
    Wanted,
)
from pipelinerl_operator.controller.restarts import excluded_nodes, start_again_at, within_window
from pipelinerl_operator.controller.views import (
    APPLIED_HASH,
    PodView,
    expected_attempt,
    is_of_job,
    unit_of,
)
from pipelinerl_operator.kube import Object
from pipelinerl_operator.kube.resources import (
    COSCHEDULING_POD_GROUPS,
    PODS,
    VOLCANO_POD_GROUPS,
    resource_of,
)
from pipelinerl_operator.objects import PodSpec

DEFAULT_TERMINATING_TIMEOUT_S = 300
PEER_GRACE_S = 10
"""Grace period of a rank whose peer crashed: it hangs in a collective."""
TAKEN_LOOK_S = 2.0
"""Seconds until a name is checked again that another object still has."""


def provision(draft: Decision, wanted: Wanted) -> None:
    """Adds the actions that make the cluster hold `wanted`.

    Nothing is created in a terminating namespace, nor while the API server refuses a pod.
    """
    seen = draft.seen
    may_create = not seen.namespace_is_going and not seen.refusal
    if may_create:
        if not seen.templates_checked and (pods := _with_template(wanted)):
            draft.actions.append(CheckTemplates(pods))
        if not seen.has_secret:
            draft.actions.append(MakeSecret())
        _apply_config(draft, wanted)
    _arrange_pods(draft, wanted, may_create)


def _with_template(wanted: Wanted) -> tuple[PodSpec, ...]:
    """The first pod of each role that has a user's template."""
    return tuple(pod for pod in wanted.desired.pods if pod.index == 0 and pod.template)


def _apply_config(draft: Decision, wanted: Wanted) -> None:
    children = {(child.resource, child.view.key.name): child for child in draft.seen.children}
    for body in wanted.desired.config:
        resource, name = resource_of(body), body["metadata"]["name"]
        child = children.pop((resource, name), None)
        if child is not None and child.view.owner_uid != draft.seen.job.uid:
            draft.look_again(TAKEN_LOOK_S)  # a predecessor's, which is being garbage collected
            continue
        stamped, applied_hash = stamp(body)
        if child is None or not child.is_current or child.view.applied_hash != applied_hash:
            draft.actions.append(Apply(resource, stamped, applied_hash, creates=child is None))
    for (resource, name), child in children.items():
        if child.view.owner_uid == draft.seen.job.uid:
            draft.actions.append(Delete(resource, name, child.view.uid))


def stamp(body: Object) -> tuple[Object, str]:
    """Returns the manifest with its own hash as an annotation, and the hash."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    applied_hash = hashlib.sha256(text.encode()).hexdigest()[:16]
    metadata = body["metadata"]
    annotations = {**(metadata.get("annotations") or {}), APPLIED_HASH: applied_hash}
    return {**body, "metadata": {**metadata, "annotations": annotations}}, applied_hash


def _arrange_pods(draft: Decision, wanted: Wanted, may_create: bool) -> None:
    seen = draft.seen
    pods = {pod.key.name: pod for pod in seen.pods}
    # New trainers wait until every old one is gone: ranks of two attempts must not meet.
    old_trainers = [pod for pod in seen.pods if pod.role == Role.TRAINER and _is_old(draft, pod)]
    avoided = _avoided_nodes(draft, wanted)
    for spec in wanted.desired.pods:
        pod = pods.pop(spec.name, None)
        due = _is_due(draft, wanted, spec)
        if pod is not None:
            _arrange(draft, pod, spec, due)
        elif due and may_create and not (spec.role is Role.TRAINER and old_trainers):
            draft.actions.append(CreatePod(spec, expected_attempt(draft.status, spec), avoided))
    remove_pods(draft, pods.values())
    _note_complete_trainers(draft, wanted)


def _arrange(draft: Decision, pod: PodView, spec: PodSpec, due: bool) -> None:
    if not is_of_job(pod, draft.seen.job.uid):
        draft.look_again(TAKEN_LOOK_S)
    elif pod.is_deleted:
        force_if_stuck(draft, pod)
    elif _is_old(draft, pod) and (due or not pod.has_ended):
        # A pod that has ended stays until its replacement is due, so that people can inspect it.
        crashed = spec.role is Role.TRAINER and any(
            each.phase == "Failed" for each in draft.seen.pods if each.role == pod.role
        )
        remove_pods(draft, [pod], PEER_GRACE_S if crashed else None)


def _is_old(draft: Decision, pod: PodView) -> bool:
    return is_of_job(pod, draft.seen.job.uid) and pod.attempt < expected_attempt(draft.status, pod)


def _is_due(draft: Decision, wanted: Wanted, spec: PodSpec) -> bool:
    policy = wanted.job.spec.failure_policy
    at = start_again_at(unit_of(spec.role, spec.index), draft.status.recent_failures, policy)
    if at <= draft.seen.now:
        return True
    draft.look_again(at - draft.seen.now)
    return False


def _avoided_nodes(draft: Decision, wanted: Wanted) -> tuple[str, ...]:
    policy = wanted.job.spec.failure_policy
    healthy = {pod.node for pod in draft.seen.pods if pod.is_ready and pod.node}
    recent = within_window(draft.status.recent_failures, policy, draft.seen.now)
    return excluded_nodes(recent, policy, healthy)


def _note_complete_trainers(draft: Decision, wanted: Wanted) -> None:
    attempts = {pod.key.name: pod.attempt for pod in draft.seen.own_pods if not pod.is_deleted}
    names = [spec.name for spec in wanted.desired.pods if spec.role is Role.TRAINER]
    attempt = draft.status.attempts.get(Role.TRAINER, 0)
    if all(attempts.get(name) == attempt for name in names):
        draft.set(complete_trainers=attempt)


def remove_pods(draft: Decision, pods: Iterable[PodView], grace_s: int | None = None) -> None:
    """Deletes the job's own among `pods`, and forces those that do not terminate."""
    for pod in pods:
        if not is_of_job(pod, draft.seen.job.uid):
            continue
        if pod.is_deleted:
            force_if_stuck(draft, pod)
        else:
            grace = 0 if pod.has_ended else grace_s
            draft.actions.append(Delete(PODS, pod.key.name, pod.uid, grace))


def force_if_stuck(draft: Decision, pod: PodView) -> None:
    """Deletes a pod by force that is still terminating long after its grace period: its node does
    not answer.
    """
    policy = draft.seen.spec.get("failurePolicy") or {}
    timeout_s = policy.get("terminatingPodTimeoutSeconds", DEFAULT_TERMINATING_TIMEOUT_S)
    if pod.deleted_at is None:
        return
    left_s = pod.deleted_at + timeout_s - draft.seen.now
    if left_s > 0:
        draft.look_again(left_s)
        return
    draft.actions.append(Delete(PODS, pod.key.name, pod.uid, 0))
    message = f"{pod.key.name} was still terminating {timeout_s} s after its grace period"
    draft.note(EventType.WARNING, "PodRemovedByForce", message)


def drop_gang(draft: Decision) -> None:
    """Deletes the PodGroup: without pods it would keep its place in the scheduler's queue."""
    for child in draft.seen.children:
        is_gang = child.resource in (VOLCANO_POD_GROUPS, COSCHEDULING_POD_GROUPS)
        if is_gang and child.view.owner_uid == draft.seen.job.uid:
            draft.actions.append(Delete(child.resource, child.view.key.name, child.view.uid))
