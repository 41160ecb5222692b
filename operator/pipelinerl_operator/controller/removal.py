"""Deleting pods, and making sure that they go."""

from collections.abc import Iterable

from pipelinerl_operator.controller.decision import Delete, Draft, EventType
from pipelinerl_operator.controller.units import is_of_job
from pipelinerl_operator.controller.views import PodView
from pipelinerl_operator.kube.resources import COSCHEDULING_POD_GROUPS, PODS, VOLCANO_POD_GROUPS

DEFAULT_TERMINATING_TIMEOUT_S = 300


def remove_pods(draft: Draft, pods: Iterable[PodView], grace_s: int | None = None) -> None:
    """Deletes the job's own among `pods`; what is being deleted already is watched over."""
    for pod in pods:
        if not is_of_job(pod, draft.seen.job.uid):
            continue
        if pod.is_deleted:
            force_if_stuck(draft, pod)
        else:
            draft.actions.append(
                Delete(PODS, pod.key.name, pod.uid, 0 if pod.has_ended else grace_s)
            )


def force_if_stuck(draft: Draft, pod: PodView) -> None:
    """A pod that is still terminating long after its grace period is on a node that will not answer
    any more.
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


def drop_gang(draft: Draft) -> None:
    """A PodGroup without pods would keep its place in the scheduler's queue."""
    for child in draft.seen.children:
        if (
            child.resource in (VOLCANO_POD_GROUPS, COSCHEDULING_POD_GROUPS)
            and child.view.owner_uid == draft.seen.job.uid
        ):
            draft.actions.append(Delete(child.resource, child.view.key.name, child.view.uid))
