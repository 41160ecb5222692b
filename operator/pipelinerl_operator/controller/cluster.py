"""What the operator keeps of the cluster: stores of jobs, pods and children, which informers fill;
and its memory of each job.
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
    """Stores of jobs, pods and children. `changed` is called with the key of every job of which an
    object changed.
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
        self._stores: Mapping[Resource, AnyStore] = {
            JOBS: self.jobs,
            PODS: self.pods,
            **self.children,
        }

    def take(self, resource: Resource, body: Object) -> None:
        """Stores the API server's answer to a write, ahead of the watch."""
        if resource in self._stores:
            self._stores[resource].put(body)

    def drop(self, resource: Resource, key: ObjectKey, uid: str) -> None:
        if resource in self._stores:
            self._stores[resource].remove(key, uid)


AnyStore = Store[JobView] | Store[PodView] | Store[OwnedView]
AnyInformer = Informer[JobView] | Informer[PodView] | Informer[OwnedView]


class Watching:
    """Informers that keep the cache up to date; `namespaces` empty means all."""

    def __init__(self, api: Api, cluster: ClusterCache, namespaces: Sequence[str]) -> None:
        self.informers: list[AnyInformer] = list(
            _informers(api, cluster, list(namespaces) or [None])
        )

    async def run(self) -> None:
        """Runs all informers until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for informer in self.informers:
                tasks.create_task(
                    informer.run(), name=f"watch {informer.selection.resource.plural}"
                )

    async def synced(self) -> None:
        """Waits until every store holds a first full list."""
        for informer in self.informers:
            await informer.synced.wait()


def child_resources(api_versions: frozenset[str]) -> tuple[Resource, ...]:
    """Kinds of children besides pods and Secrets, as far as the server has them."""
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
"""Time after which an action that the API server refused is tried again."""

ENSURED_S = 600.0
"""Time after which a Secret that was created or read is checked again."""


@dataclass
class JobMemory:
    """What the operator remembers of one job between two decisions and can do without, as a new
    leader does. Times are monotonic seconds.
    """

    job: JobView
    """The job as it was reconciled last."""
    token: str | None = None
    """The job's bearer token, once its Secret has been created or read."""
    ensured_generation: int = -1
    """Generation of the spec for which the job has its Secret and its streams on the server."""
    ensured_at: float = 0.0
    has_left: bool = False
    """Whether its streams on the server have been removed."""
    stream_fault: str = ""
    """Why it has no streams on the server yet."""
    checked_generation: int = -1
    """Generation of the spec whose templates the API server has accepted."""
    refusal: str = ""
    refused_generation: int = -1
    refused_at: float = 0.0
    namespace_going_at: float | None = None
    applied: dict[tuple[Resource, str], tuple[str, str]] = field(default_factory=dict)
    """UID and content version of each child as the operator last applied it, or first found it."""
    pods: Mapping[str, int] = field(default_factory=dict)
    """Attempts by name of the pods that should still exist unless others remove them."""
    noticed_at: float | None = None
    """When the status in the API server was first found to be out of date."""
    training_written_at: float = float("-inf")
    written: tuple[str, int] | None = None
    """Resource version after the newest write of the status, and a hash of that status."""

    def is_ensured(self, generation: int, now: float) -> bool:
        """Whether the Secret was checked recently: Secrets are not watched, and may be deleted."""
        return (
            self.token is not None
            and self.ensured_generation == generation
            and now - self.ensured_at < ENSURED_S
        )

    def refuse(self, message: str, generation: int, now: float) -> None:
        self.refusal, self.refused_generation, self.refused_at = message, generation, now

    def current_refusal(self, generation: int, now: float) -> str:
        """The refusal, or an empty text once the spec has changed or it is time to try again."""
        if self.refused_generation != generation or now - self.refused_at >= REFUSAL_S:
            return ""
        return self.refusal

    def namespace_is_going(self, now: float) -> bool:
        return self.namespace_going_at is not None and now - self.namespace_going_at < REFUSAL_S
