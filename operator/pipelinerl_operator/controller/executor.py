"""Executes decisions. Every action may be repeated: names are fixed, deletions name a UID, and an
object that a creation finds already there is recognised by its owner.
"""

import asyncio
import base64
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pipelinerl_common.errors import PipelineRLError, SettingsError, TemporaryError, Unavailable
from pipelinerl_operator.controller.cluster import ClusterCache, JobMemory
from pipelinerl_operator.controller.decision import (
    Action,
    Apply,
    CheckTemplates,
    CreatePod,
    Delete,
    MakeSecret,
    Wanted,
)
from pipelinerl_operator.controller.events import EventRecorder
from pipelinerl_operator.controller.job_runtime import JobRuntimes
from pipelinerl_operator.controller.streams import JobStreams
from pipelinerl_operator.controller.views import JobView, OwnedView
from pipelinerl_operator.kube import Api, Object, ObjectKey, Resource
from pipelinerl_operator.kube.errors import AlreadyExists, Conflict, Forbidden, Invalid, NotFound
from pipelinerl_operator.kube.resources import JOBS, PODS, SECRETS
from pipelinerl_operator.objects import OperatorContext, job_secret
from pipelinerl_operator.objects.names import TOKEN_KEY, secret_name

log = logging.getLogger(__name__)

MAX_AT_ONCE = 16
"""Concurrent calls for one job; the client bounds those for all jobs."""
TOKEN_BYTES = 32


class RefusedByServer(PipelineRLError):
    """The API server refuses an action. It is remembered for the next decision; the remaining
    actions are dropped.
    """


@dataclass(frozen=True)
class Dependencies:
    """What reconciling works with."""

    api: Api
    cluster: ClusterCache
    context: OperatorContext
    runtimes: JobRuntimes
    recorder: EventRecorder
    streams: JobStreams
    clock: Callable[[], float] = time.time
    """Seconds since the epoch."""
    monotonic: Callable[[], float] = time.monotonic


async def execute(
    deps: Dependencies,
    job: JobView,
    wanted: Wanted | None,
    actions: Sequence[Action],
    memory: JobMemory,
) -> None:
    """Executes the actions in order, neighbours of one kind concurrently.

    Raises the error that stops it; the caller retries.
    """
    execution = _Execution(deps, job, wanted, memory)
    for _, group in itertools.groupby(actions, key=type):
        await _all(execution.do(action) for action in group)


@dataclass
class _Execution:
    """Executes the actions of one job."""

    deps: Dependencies
    job: JobView
    wanted: Wanted | None
    memory: JobMemory

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
                self.memory.namespace_going_at = self.deps.monotonic()
                raise RefusedByServer(str(error)) from error
            raise self._refused(str(error)) from error

    async def _check_templates(self, action: CheckTemplates) -> None:
        for pod in action.pods:
            try:
                await self.deps.api.create(
                    PODS,
                    self.job.key.namespace,
                    self._without_own_account(pod.manifest(0)),
                    dry_run=True,
                )
            except AlreadyExists:
                continue  # a pod of a predecessor that is still terminating
        self.memory.checked_generation = self.job.generation

    def _without_own_account(self, body: Object) -> Object:
        """The pod without the job's ServiceAccount, which is created only after the templates are
        accepted: the server refuses pods whose account does not exist.
        """
        if body["spec"].get("serviceAccountName") != self.job.key.name:
            return body
        spec = {name: value for name, value in body["spec"].items() if name != "serviceAccountName"}
        return {**body, "spec": spec}

    async def _make_secret(self) -> None:
        if self.wanted is None:
            return
        name, memory = secret_name(self.job.key.name), self.memory
        found = await self._find_secret(name)
        if found is not None:
            memory.token = _token_of(found)
        try:
            login = await self.deps.streams.ensure(self.wanted.job)
        except Unavailable as error:
            memory.stream_fault = str(error)
            if found is None:
                raise
            # The job continues: the server will return, and pods that have a login wait for it.
            log.warning("job=%s its streams are not checked: %s", self.job.key, error)
            return
        memory.stream_fault = ""
        if found is None:
            # A Secret that was deleted is created with the same token, which running pods hold.
            token = memory.token or secrets.token_urlsafe(TOKEN_BYTES)
            body = job_secret(self.wanted.job, token, login)
            memory.token = _token_of(await self._create(SECRETS, name, body))
        memory.ensured_generation, memory.ensured_at = self.job.generation, self.deps.monotonic()

    async def _find_secret(self, name: str) -> Object | None:
        try:
            found = await self.deps.api.get(SECRETS, self.job.key.namespace, name)
        except NotFound:
            return None
        self._check_owner(SECRETS, found)
        return found

    async def _apply(self, action: Apply) -> None:
        name = action.body["metadata"]["name"]
        if action.creates:
            made = await self._create(action.resource, name, action.body)
        else:
            made = await self.deps.api.apply(action.resource, self.job.key.namespace, action.body)
        view = OwnedView.of(made)
        self.memory.applied[action.resource, name] = (view.uid, view.content_version)
        self.deps.cluster.take(action.resource, made)

    async def _create_pod(self, action: CreatePod) -> None:
        body = action.pod.manifest(action.attempt, action.excluded_nodes)
        self.deps.cluster.take(PODS, await self._create(PODS, action.pod.name, body))

    async def _create(self, resource: Resource, name: str, body: Object) -> Object:
        """Creates the object, or returns the job's own one of that name, which may have been
        created before and not be in the cache yet.
        """
        try:
            return await self.deps.api.create(resource, self.job.key.namespace, body)
        except AlreadyExists:
            found = await self.deps.api.get(resource, self.job.key.namespace, name)
            self._check_owner(resource, found)
            return found

    def _check_owner(self, resource: Resource, found: Object) -> None:
        """Raises TemporaryError for the object of a predecessor, which is being garbage collected,
        and RefusedByServer for any other that is not the job's.
        """
        metadata = found["metadata"]
        owner: Object = next(
            (each for each in metadata.get("ownerReferences") or () if each.get("controller")), {}
        )
        if owner.get("uid") == self.job.uid:
            return
        what = f"{resource.kind} {metadata['name']}"
        if owner.get("kind") == JOBS.kind and owner.get("name") == self.job.key.name:
            raise TemporaryError(f"{what} is a predecessor's that is still being removed")
        raise self._refused(
            f"{what} exists already and is not this job's: remove it, or give the job another name"
        )

    async def _delete(self, action: Delete) -> None:
        key = ObjectKey(self.job.key.namespace, action.name)
        try:
            left = await self.deps.api.delete(
                action.resource,
                self.job.key.namespace,
                action.name,
                uid=action.uid,
                grace_s=action.grace_s,
            )
        except NotFound:
            self.deps.cluster.drop(action.resource, key, action.uid)
        except Conflict:
            log.info("job=%s %s is another object by now", self.job.key, action.name)
        else:
            is_there = left.get("kind") == action.resource.kind
            if is_there and left["metadata"].get("deletionTimestamp"):
                self.deps.cluster.take(action.resource, left)
            else:
                self.deps.cluster.drop(action.resource, key, action.uid)

    def _refused(self, message: str) -> RefusedByServer:
        self.memory.refuse(message, self.job.generation, self.deps.monotonic())
        return RefusedByServer(message)


def _token_of(found: Object) -> str:
    return base64.b64decode(found["data"][TOKEN_KEY]).decode()


async def _all(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Awaits all calls, a bounded number at once. Raises the first error after all have ended."""
    turns = asyncio.Semaphore(MAX_AT_ONCE)

    async def bounded(call: Coroutine[Any, Any, None]) -> None:
        async with turns:
            await call

    results = await asyncio.gather(*(bounded(call) for call in calls), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
