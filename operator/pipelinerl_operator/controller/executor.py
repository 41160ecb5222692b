"""Carries decisions out. Every action may be repeated: names are fixed, deletions name a UID, and
what a creation finds already there is recognised by its owner.
"""

import asyncio
import base64
import itertools
import logging
import secrets
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from pipelinerl_common.errors import PipelineRLError, SettingsError, TemporaryError, Unavailable
from pipelinerl_operator.controller.cluster import ClusterCache, Memory
from pipelinerl_operator.controller.decision import (
    Action,
    Apply,
    CheckTemplates,
    CreatePod,
    Delete,
    MakeSecret,
    Wanted,
)
from pipelinerl_operator.controller.streams import JobStreams
from pipelinerl_operator.controller.views import JobView, OwnedView
from pipelinerl_operator.kube import Api, Object, ObjectKey, Resource
from pipelinerl_operator.kube.errors import AlreadyExists, Conflict, Forbidden, Invalid, NotFound
from pipelinerl_operator.kube.resources import JOBS, PODS, SECRETS
from pipelinerl_operator.objects import job_secret
from pipelinerl_operator.objects.names import TOKEN_KEY, secret_name

log = logging.getLogger(__name__)

MAX_AT_ONCE = 16
"""Calls for one job; the client bounds those for all."""
TOKEN_BYTES = 32


class RefusedByServer(PipelineRLError):
    """The API server will not have it; remembered, so that the next decision says so. Nothing
    further is tried now.
    """


class Executor:
    def __init__(
        self,
        api: Api,
        cluster: ClusterCache,
        streams: JobStreams,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._around = _Around(api, cluster, streams, clock)

    async def carry_out(
        self, job: JobView, wanted: Wanted | None, actions: Sequence[Action], memory: Memory
    ) -> None:
        """In order, neighbours of one kind at once. Raises what keeps it from going on, to be tried
        again.
        """
        turn = _Turn(self._around, job, wanted, memory)
        for _, group in itertools.groupby(actions, key=type):
            await _all(turn.do(action) for action in group)


@dataclass(frozen=True, slots=True)
class _Around:
    api: Api
    cluster: ClusterCache
    streams: JobStreams
    clock: Callable[[], float]


class _Turn:
    """One job's actions."""

    def __init__(
        self, around: _Around, job: JobView, wanted: Wanted | None, memory: Memory
    ) -> None:
        self._api = around.api
        self._cluster = around.cluster
        self._streams = around.streams
        self._clock = around.clock
        self._job = job
        self._wanted = wanted
        self._memory = memory
        self._namespace = job.key.namespace

    async def do(self, action: Action) -> None:
        try:
            match action:
                case CheckTemplates():
                    await self._check_templates(action)
                case MakeSecret():
                    await self._make_secret()
                case Apply():
                    await self._apply(action)
                case Delete():
                    await self._delete(action)
                case CreatePod():
                    await self._create_pod(action)
        except (Invalid, SettingsError) as error:
            raise self._refused(str(error)) from error
        except Forbidden as error:
            if error.namespace_terminating:
                self._memory.namespace_going_at = self._clock()
                raise RefusedByServer(str(error)) from error
            raise self._refused(str(error)) from error

    async def _check_templates(self, action: CheckTemplates) -> None:
        for pod in action.pods:
            try:
                await self._api.create(
                    PODS, self._namespace, self._without_own_account(pod.manifest(0)), dry_run=True
                )
            except AlreadyExists:
                continue  # a predecessor's pod that is still on its way out
        self._memory.checked_generation = self._job.generation

    def _without_own_account(self, body: Object) -> Object:
        """The job's ServiceAccount is made after the templates are accepted; until then the server
        would refuse every pod.
        """
        own = body["spec"].get("serviceAccountName") == self._job.key.name
        return (
            {**body, "spec": {k: v for k, v in body["spec"].items() if k != "serviceAccountName"}}
            if own
            else body
        )

    async def _make_secret(self) -> None:
        if self._wanted is None:
            return
        name, memory = secret_name(self._job.key.name), self._memory
        found = await self._find_secret(name)
        if found is not None:
            memory.token = _token_of(found)
        try:
            login = await self._streams.ensure(self._wanted.job)
        except Unavailable as error:
            memory.stream_fault = str(error)
            if (
                found is not None
                # everything else goes on: the server will be back, and pods with a login wait for it
            ):
                log.warning(
                    "job=%s its place on the stream's server is not checked: %s",
                    self._job.key,
                    error,
                )
                return
            raise
        memory.stream_fault = ""
        if found is None:
            token = memory.token or secrets.token_urlsafe(
                TOKEN_BYTES
            )  # one that was deleted comes back as it was
            memory.token = _token_of(
                await self._create(SECRETS, name, job_secret(self._wanted.job, token, login))
            )
        memory.ensured_generation, memory.ensured_at = self._job.generation, self._clock()

    async def _find_secret(self, name: str) -> Object | None:
        try:
            found = await self._api.get(SECRETS, self._namespace, name)
        except NotFound:
            return None
        self._check_owner(SECRETS, found)
        return found

    async def _apply(self, action: Apply) -> None:
        name = action.body["metadata"]["name"]
        if action.creates:
            made = await self._create(action.resource, name, action.body)
        else:
            made = await self._api.apply(action.resource, self._namespace, action.body)
        view = OwnedView.of(made)
        self._memory.applied[action.resource, name] = (view.uid, view.content_version)
        self._cluster.take(action.resource, made)

    async def _create_pod(self, action: CreatePod) -> None:
        body = action.pod.manifest(action.attempt, action.excluded_nodes)
        self._cluster.take(PODS, await self._create(PODS, action.pod.name, body))

    async def _create(self, resource: Resource, name: str, body: Object) -> Object:
        """The object of that name, provided it is the job's: one that was made before and is not
        seen yet will do.
        """
        try:
            return await self._api.create(resource, self._namespace, body)
        except AlreadyExists:
            found = await self._api.get(resource, self._namespace, name)
            self._check_owner(resource, found)
            return found

    def _check_owner(self, resource: Resource, found: Object) -> None:
        """Raises TemporaryError for a predecessor's object, which is being collected, and refuses
        anybody else's.
        """
        metadata = found["metadata"]
        owner: Object = next(
            (each for each in metadata.get("ownerReferences") or () if each.get("controller")), {}
        )
        if owner.get("uid") == self._job.uid:
            return
        what = f"{resource.kind} {metadata['name']}"
        if owner.get("kind") == JOBS.kind and owner.get("name") == self._job.key.name:
            raise TemporaryError(f"{what} is a predecessor's that is still being removed")
        raise self._refused(
            f"{what} exists already and is not this job's: remove it, or give the job another name"
        )

    async def _delete(self, action: Delete) -> None:
        key = ObjectKey(self._namespace, action.name)
        try:
            left = await self._api.delete(
                action.resource,
                self._namespace,
                action.name,
                uid=action.uid,
                grace_s=action.grace_s,
            )
        except NotFound:
            self._cluster.drop(action.resource, key, action.uid)
        except Conflict:
            log.info("job=%s %s is another one by now", self._job.key, action.name)
        else:
            if left.get("kind") == action.resource.kind and left["metadata"].get(
                "deletionTimestamp"
            ):
                self._cluster.take(action.resource, left)
            else:
                self._cluster.drop(action.resource, key, action.uid)

    def _refused(self, message: str) -> RefusedByServer:
        self._memory.refuse(message, self._job.generation, self._clock())
        return RefusedByServer(message)


def _token_of(found: Object) -> str:
    return base64.b64decode(found["data"][TOKEN_KEY]).decode()


async def _all(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs them, a bounded number at once; when some fail, the rest still end before the first
    error is raised.
    """
    turns = asyncio.Semaphore(MAX_AT_ONCE)

    async def bounded(call: Coroutine[Any, Any, None]) -> None:
        async with turns:
            await call

    results = await asyncio.gather(*(bounded(call) for call in calls), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
