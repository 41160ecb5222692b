"""A job's streams on the stream server: created before the job's pods, removed with the job.

`AccountStreams` is for the server of the chart, where every job has an account of its own.
`SharedStreams` is for a foreign server with one login for all jobs: there only the namespace in the
streams' names separates jobs.
"""

import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Protocol

from pipelinerl_common.errors import Unavailable
from pipelinerl_common.stream import Login, StreamConnection, StreamLayout
from pipelinerl_operator.nats.server import AccountClient, StreamClient
from pipelinerl_operator.nats.trust import (
    TIMELESS,
    KeyKind,
    NatsKey,
    Rights,
    StreamLimits,
    administration_credentials,
    credentials,
    system_account,
    user_token,
)
from pipelinerl_operator.objects.job_resource import JobResource

log = logging.getLogger(__name__)

_CLIENT: Final = "pipelinerl-operator"
_ROOM_S: Final = 5.0
_MAX_CONSUMERS: Final = 64
"""Consumers of an account: the preprocessor's, one per reader of metrics, and for a minute those of
readers that have died.
"""


class StreamAdmin(Protocol):
    """Creates and removes the streams of jobs. Every method ends within a few seconds."""

    async def ensure(self, job: JobResource) -> str | None:
        """Creates or updates what the job has on the server, and returns the content of
        `nats.creds` in its Secret: always the same text for one job, None where the server needs no
        login.

        Called before the pods are created and when the spec changes. Raises Unavailable.
        """

    async def remove(self, job: JobResource) -> bool:
        """Removes all that the job has on the server. False, with a warning in the log, when the
        server does not confirm it in time.
        """

    async def sweep(self, uids: Callable[[], Collection[str]], namespaces: Collection[str]) -> int:
        """Removes what deleted jobs have left, and returns of how many jobs. `uids` returns those
        of all jobs in `namespaces` (empty: in all), called after the server was asked. Raises
        Unavailable.
        """


class AccountStreams:
    """One account per job, derived from the job's UID: a new job of the same name shares nothing
    with the old one.
    """

    def __init__(
        self, requests: StreamConnection, operator: NatsKey, url: str, ca_file: Path | None
    ) -> None:
        self._server = AccountClient(requests, operator)
        self._operator = operator
        self._url = url
        self._ca_file = ca_file

    @classmethod
    @asynccontextmanager
    async def open(
        cls, url: str, operator: NatsKey, ca_file: Path | None = None
    ) -> AsyncIterator["AccountStreams"]:
        """Connects in the background: the server may start later, and after a return without its
        disk it receives all accounts again.
        """
        login = Login(credentials_text=administration_credentials(operator), ca_file=ca_file)
        async with StreamConnection.open_in_background(url, login, name=_CLIENT) as requests:
            streams = cls(requests, operator, url, ca_file)
            async with streams._server.restoring():
                yield streams

    async def ensure(self, job: JobResource) -> str:
        account, limits = self._account(job), _limits(_layout(job))
        text = _job_credentials(job, account)
        if await self._server.ensure(account.public, f"{job.namespace}/{job.name}", limits):
            await self._check_room(account.public, text, limits)
        return text

    async def _check_room(self, account: str, credentials_text: str, limits: StreamLimits) -> None:
        """Checks that the server gives the account JetStream, which it does at the first login and
        only if the limits fit in the store. Raises Unavailable.
        """
        login = Login(credentials_text=credentials_text, ca_file=self._ca_file)
        async with StreamConnection.open_in_background(self._url, login, name=_CLIENT) as requests:
            try:
                await requests.ask("$JS.API.INFO", b"", _ROOM_S)
            except Unavailable as error:
                self._server.forget(account)
                # Otherwise a cluster has no leader yet, or the server is unreachable again.
                if "no responders" not in str(error):
                    raise
                raise Unavailable(
                    "the stream's server has no room for the streams of this job, which reserve "
                    f"{limits.disk_bytes} bytes "
                    "(spec.stream.maxBytes and 768 MiB, times spec.stream.replicas): lower "
                    "maxBytes, remove jobs, or give the "
                    f"server a larger store ({error})"
                ) from error

    async def remove(self, job: JobResource) -> bool:
        try:
            await self._server.remove(self._account(job).public)
        except Unavailable as error:
            log.warning(
                "job=%s/%s its NATS account and streams were not removed: %s",
                job.namespace,
                job.name,
                error,
            )
            return False
        return True

    async def sweep(self, uids: Callable[[], Collection[str]], namespaces: Collection[str]) -> int:
        found = await self._server.accounts()
        kept = {self._account_of(uid).public for uid in uids()} | {
            system_account(self._operator).public
        }
        num_removed = 0
        for account in found:
            if account in kept:
                continue
            namespace, is_job, _ = (name := await self._server.name_of(account) or "").partition(
                "/"
            )
            if not is_job or (namespaces and namespace not in namespaces):
                continue
            await self._server.remove(account)
            log.info("job=%s was deleted: its NATS account and streams are removed", name)
            num_removed += 1
        return num_removed

    def _account(self, job: JobResource) -> NatsKey:
        return self._account_of(job.uid)

    def _account_of(self, uid: str) -> NatsKey:
        return self._operator.derive(KeyKind.ACCOUNT, "job", uid)


class SharedStreams:
    """Streams of all jobs in one account, under one login."""

    def __init__(self, requests: StreamConnection, login_text: str | None) -> None:
        self._server = StreamClient(requests)
        self._login_text = login_text

    @classmethod
    @asynccontextmanager
    async def open(
        cls, url: str, login_text: str | None = None, ca_file: Path | None = None
    ) -> AsyncIterator["SharedStreams"]:
        """Connects in the background. `login_text`, for the operator and all jobs, is the content
        of a credentials file, `user:password` or a token. Raises SettingsError when it is none of
        them.
        """
        login = (
            Login(ca_file=ca_file) if login_text is None else Login.from_text(login_text, ca_file)
        )
        async with StreamConnection.open_in_background(url, login, name=_CLIENT) as requests:
            yield cls(requests, login_text)

    async def ensure(self, job: JobResource) -> str | None:
        return self._login_text

    async def remove(self, job: JobResource) -> bool:
        try:
            for stream in _layout(job).streams:
                await self._server.delete(stream)
        except Unavailable as error:
            log.warning(
                "job=%s/%s its streams were not removed: %s", job.namespace, job.name, error
            )
            return False
        return True

    async def sweep(self, uids: Callable[[], Collection[str]], namespaces: Collection[str]) -> int:
        return 0  # on a foreign server the owner of a stream is unknown


def _layout(job: JobResource) -> StreamLayout:
    return StreamLayout(job.name, job.spec.stream, job.namespace)


def _limits(layout: StreamLayout) -> StreamLimits:
    return StreamLimits(
        num_streams=len(layout.streams),
        num_consumers=_MAX_CONSUMERS,
        disk_bytes=layout.reserved_bytes * layout.settings.replicas,
    )


def _job_credentials(job: JobResource, account: NatsKey) -> str:
    user = account.derive(KeyKind.USER, "services")
    rights = Rights(publish=_layout(job).publish_subjects, subscribe=("_INBOX.>",))
    return credentials(user_token(account, user.public, job.name, rights, TIMELESS), user)
