"""The streams of each job on the stream server: created before its pods, removed after the job.

No finalizer delays the deletion of a job or its namespace: streams of jobs whose end no leader saw
are found and removed by a periodic sweep.
"""

import argparse
import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path

from pipelinerl_common.errors import SettingsError, Unavailable
from pipelinerl_operator.controller.views import JobView
from pipelinerl_operator.kube import Api, ObjectKey
from pipelinerl_operator.kube.errors import AlreadyExists, NotFound
from pipelinerl_operator.kube.resources import SECRETS
from pipelinerl_operator.nats.streams import AccountStreams, SharedStreams, StreamAdmin
from pipelinerl_operator.nats.trust import KeyKind, auth_secret, operator_key
from pipelinerl_operator.nats.trust import NatsKey as StreamKey
from pipelinerl_operator.objects import JobResource

log = logging.getLogger(__name__)

MAX_AT_ONCE = 8
SWEEP_S = 600.0
CLOSE_S = 5.0


class JobStreams:
    """Creates and removes streams in the right order. Without `admin` nothing is created
    beforehand, and pods log in with the job's token or without a login.
    """

    def __init__(self, admin: StreamAdmin | None) -> None:
        self._admin = admin
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)
        self._leaving: dict[ObjectKey, asyncio.Task[None]] = {}

    async def ensure(self, job: JobResource) -> str | None:
        """Creates the job's streams. Returns the content of `nats.creds` in its Secret, None
        without one. Raises Unavailable.
        """
        if self._admin is None:
            return None
        predecessor = self._leaving.get(ObjectKey(job.namespace, job.name))
        if predecessor is not None:
            # Streams of a job of the same name are still being removed: they must be gone first.
            await asyncio.wait({predecessor})
        return await self._admin.ensure(job)

    async def run_sweeps(
        self, uids: Callable[[], Collection[str]], namespaces: Collection[str]
    ) -> None:
        """Removes the streams of jobs whose end no leader saw, every SWEEP_S until cancelled."""
        while self._admin is not None:
            try:
                await self._admin.sweep(uids, namespaces)
            except Unavailable as error:
                log.info("streams of deleted jobs are swept later: %s", error)
            await asyncio.sleep(SWEEP_S)

    def leave(self, job: JobView) -> None:
        """Starts to remove the job's streams in the background."""
        if self._admin is None:
            return
        task = asyncio.create_task(
            self._remove(self._admin, job), name=f"remove streams of {job.key}"
        )
        self._leaving[job.key] = task
        task.add_done_callback(
            lambda done: (
                self._leaving.pop(job.key, None) if self._leaving.get(job.key) is done else None
            )
        )

    async def close(self) -> None:
        if self._leaving:
            # What does not end in time is removed by the next leader's sweep.
            await asyncio.wait(set(self._leaving.values()), timeout=CLOSE_S)
        for task in self._leaving.values():
            task.cancel()

    async def _remove(self, admin: StreamAdmin, job: JobView) -> None:
        try:
            resource = JobResource.parse(job.body)
        except SettingsError:  # an invalid job never had streams
            return
        async with self._turns:
            await admin.remove(resource)


@asynccontextmanager
async def stream_admin(
    arguments: argparse.Namespace, api: Api, namespace: str
) -> AsyncIterator[StreamAdmin]:
    """The administration of streams: accounts of the chart's own server with --nats-auth-secret,
    else a shared login, with --nats-credentials or without.

    Raises SettingsError for a wrong Secret or file.
    """
    if arguments.nats_auth_secret:
        key = await _operator_key(api, namespace, arguments.nats_auth_secret)
        async with AccountStreams.open(arguments.nats_url, key, arguments.nats_ca_file) as accounts:
            yield accounts
    else:
        login = read_file("--nats-credentials", arguments.nats_credentials)
        async with SharedStreams.open(arguments.nats_url, login, arguments.nats_ca_file) as shared:
            yield shared


def read_file(flag: str, path: Path | None) -> str | None:
    """Content of the file, None without a path. Raises SettingsError when it cannot be read."""
    try:
        return None if path is None else path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{flag} {path}: cannot be read: {error}") from error


async def _operator_key(api: Api, namespace: str, name: str) -> StreamKey:
    """The key in the Secret, which is created once; the stream server starts when it exists."""
    try:
        return operator_key(await api.get(SECRETS, namespace, name))
    except NotFound:
        key = StreamKey.generate(KeyKind.OPERATOR)
    try:
        await api.create(
            SECRETS, namespace, auth_secret(name, key, {"app.kubernetes.io/part-of": "pipelinerl"})
        )
        log.info("secret=%s/%s created for the stream server", namespace, name)
        return key
    except AlreadyExists:
        return operator_key(await api.get(SECRETS, namespace, name))
