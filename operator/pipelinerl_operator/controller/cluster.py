"""The operator's picture of the cluster: one informer per kind and namespace, and which job each
object belongs to.

What the operator keeps in mind of a job between two looks, and can do without: a new leader
begins with nothing.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pipelinerl_operator.controller.views import JobView, OwnedView, PodView
from pipelinerl_operator.kube import Api, Informer, Object, ObjectKey, Resource, Selection, Store
from pipelinerl_operator.kube.resources import (
    CONFIG_MAPS,
    COSCHEDULING_POD_GROUPS,
    DISRUPTION_BUDGETS,
    DISRUPTION_BUDGETS_V1BETA1,
    JOBS,
    NETWORK_POLICIES,
    PODS,
    SERVICE_ACCOUNTS,
    SERVICES,
    VOLCANO_POD_GROUPS,
)
from pipelinerl_operator.objects.names import MANAGED_BY, MANAGER

OWNED = f"{MANAGED_BY}={MANAGER}"


class ClusterCache:
    """Stores of jobs, pods and children. `changed` hears the key of every job about which something
    changed.
    """

    def __init__(
        self, child_resources: Sequence[Resource], changed: Callable[[ObjectKey], None]
    ) -> None:
        self.jobs = Store[JobView](JobView.of, lambda view: view.key, changed)
        self.pods = Store[PodView](
            PodView.of, lambda view: ObjectKey(view.key.namespace, view.job), changed
        )
        self.children: Mapping[Resource, Store[OwnedView]] = {
            resource: Store[OwnedView](
                OwnedView.of, lambda view: ObjectKey(view.key.namespace, view.job), changed
            )
            for resource in child_resources
        }

    def take(self, resource: Resource, body: Object) -> None:
        """What the API server answered to a write, ahead of the watch."""
        if resource == JOBS:
            self.jobs.put(body)
        elif resource == PODS:
            self.pods.put(body)
        elif resource in self.children:
            self.children[resource].put(body)

    def drop(self, resource: Resource, key: ObjectKey, uid: str) -> None:
        if resource == JOBS:
            self.jobs.remove(key, uid)
        elif resource == PODS:
            self.pods.remove(key, uid)
        elif resource in self.children:
            self.children[resource].remove(key, uid)


AnyInformer = Informer[JobView] | Informer[PodView] | Informer[OwnedView]


class Watching:
    """Keeps a cluster's stores up to date; `namespaces` empty is all of them."""

    def __init__(self, api: Api, cluster: ClusterCache, namespaces: Sequence[str]) -> None:
        self.informers: list[AnyInformer] = list(
            _informers(api, cluster, list(namespaces) or [None])
        )

    async def run(self) -> None:
        """For ever."""
        async with asyncio.TaskGroup() as tasks:
            for informer in self.informers:
                tasks.create_task(
                    informer.run(), name=f"watch {informer.selection.resource.plural}"
                )

    async def synced(self) -> None:
        """Until every store holds a first full list."""
        for informer in self.informers:
            await informer.synced.wait()


def child_resources(api_versions: frozenset[str]) -> tuple[Resource, ...]:
    """Kinds of children beside pods and secrets, as far as the server has them."""
    budgets = (
        DISRUPTION_BUDGETS
        if DISRUPTION_BUDGETS.api_version in api_versions
        else DISRUPTION_BUDGETS_V1BETA1
    )
    gangs = [
        each
        for each in (VOLCANO_POD_GROUPS, COSCHEDULING_POD_GROUPS)
        if each.api_version in api_versions
    ]
    return (SERVICE_ACCOUNTS, CONFIG_MAPS, SERVICES, NETWORK_POLICIES, budgets, *gangs)


def _informers(
    api: Api, cluster: ClusterCache, namespaces: Sequence[str | None]
) -> Iterator[AnyInformer]:
    for namespace in namespaces:
        yield Informer(api, Selection(JOBS, namespace), cluster.jobs)
        yield Informer(api, Selection(PODS, namespace, OWNED), cluster.pods)
        for resource, store in cluster.children.items():
            yield Informer(api, Selection(resource, namespace, OWNED, metadata_only=True), store)


REFUSAL_S = 60.0
"""How long a refusal of the API server is believed before it is asked again."""

ENSURED_S = 600.0
"""How long a Secret that was made or read is believed to be there."""


@dataclass
class Memory:
    """Of one job, by its UID. Times are monotonic seconds."""

    job: JobView
    """As it was looked at last."""
    token: str | None = None
    """The job's bearer token, once its Secret has been made or read."""
    ensured_generation: int = -1
    """Generation of the spec for which the job has its Secret and its place on the stream's server.
    """
    ensured_at: float = 0.0
    has_left: bool = False
    """Whether its place on the stream's server was given up."""
    stream_fault: str = ""
    """Why it has no place on the stream's server yet."""
    checked_generation: int = -1
    """Generation of the spec whose templates the API server has accepted."""
    refusal: str = ""
    refused_generation: int = -1
    refused_at: float = 0.0
    namespace_going_at: float | None = None
    applied: dict[tuple[Resource, str], tuple[str, str]] = field(default_factory=dict)
    """UID and content version of each child as the operator applied it last, or found it when it
    began.
    """
    pods: Mapping[str, int] = field(default_factory=dict)
    """Attempts by name of the pods that were there at the last look, without those that were then
    to be deleted.
    """
    noticed_at: float | None = None
    """When it was first noticed that the status in the API server is out of date."""
    training_written_at: float = float("-inf")
    written: tuple[str, int] | None = None
    """Resource version after the newest write of the status, and a hash of what was written."""

    def is_ensured(self, generation: int, now: float) -> bool:
        """False again after a while: nobody watches Secrets, and one may be gone."""
        return (
            self.token is not None
            and self.ensured_generation == generation
            and now - self.ensured_at < ENSURED_S
        )

    def refuse(self, message: str, generation: int, now: float) -> None:
        self.refusal, self.refused_generation, self.refused_at = message, generation, now

    def current_refusal(self, generation: int, now: float) -> str:
        """Empty once the spec has changed or the time has come to ask again."""
        if self.refused_generation != generation or now - self.refused_at >= REFUSAL_S:
            return ""
        return self.refusal

    def namespace_is_going(self, now: float) -> bool:
        return self.namespace_going_at is not None and now - self.namespace_going_at < REFUSAL_S
