"""A job's place on the stream's server: made, looked at, and removed with the job.

`AccountStreams` is for the server of the chart, where every job has an account of its own. `SharedStreams` is for a server of
somebody else's with one login for everybody: there only the namespace in the streams' names keeps
jobs apart.
"""

import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
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
"""The preprocessor's own, one for everybody who watches metrics, and for a minute those of readers
that have died.
"""


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """`status.stream` of a job.

    Example: StreamStatus(pending=12, oldest_seconds=3.4).
    """

    pending: int
    """Messages on the sample stream that no optimizer step has used yet."""
    oldest_seconds: float
    """Age of the oldest of them, by the server's clock; 0 without one."""


class StreamAdmin(Protocol):
    """Every method ends within a few seconds, whatever the server does."""

    async def ensure(self, job: JobResource) -> str | None:
        """Makes the job's place, or brings it up to date, and returns what goes into `nats.creds`
        of the job's Secret: always the same text for one job. None where the server asks for
        nothing. Due before the job's pods are made and whenever its spec changes; free of charge
        when there is nothing to do. Raises Unavailable.
        """

    async def remove(self, job: JobResource) -> bool:
        """Removes the job's place and all that is on it. False, with a warning in the log, when the
        server has not said so in time: then what is there stays.
        """

    async def observe(self, job: JobResource) -> StreamStatus | None:
        """None while the job has no stream. Raises Unavailable."""

    async def sweep(self, uids: Callable[[], Collection[str]], namespaces: Collection[str]) -> int:
        """Removes the places of jobs that are no more, which nobody saw go; returns how many.
        `uids` are those of all jobs in
        `namespaces` (empty: in every one), asked for after what is there was looked at. Raises Unavailable."""


class AccountStreams:
    """An account per job, derived from the job's UID: a job made anew under an old name has nothing
    of the old one's.
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
        """Connects beside the block: a server that starts later will do, and one that comes back
        without its disk is told of all accounts again.
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
        """The server takes every account, but gives it JetStream, at its first login, only where
        its limits still fit into the store. Raises Unavailable.
        """
        login = Login(credentials_text=credentials_text, ca_file=self._ca_file)
        async with StreamConnection.open_in_background(self._url, login, name=_CLIENT) as requests:
            try:
                await requests.ask("$JS.API.INFO", b"", _ROOM_S)
            except Unavailable as error:
                self._server.forget(account)
                if "no responders" not in str(
                    error
                ):  # a cluster without a leader yet, or a server that is gone again
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
                "job=%s/%s its NATS account and streams stay behind: %s",
                job.namespace,
                job.name,
                error,
            )
            return False
        return True

    async def observe(self, job: JobResource) -> StreamStatus | None:
        found = await self._server.stream_state(
            self._account(job).public, _layout(job).stream("samples")
        )
        return None if found is None else StreamStatus(*found)

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
            log.info("job=%s is gone: its NATS account and streams are removed", name)
            num_removed += 1
        return num_removed

    def _account(self, job: JobResource) -> NatsKey:
        return self._account_of(job.uid)

    def _account_of(self, uid: str) -> NatsKey:
        return self._operator.derive(KeyKind.ACCOUNT, "job", uid)


class SharedStreams:
    """Everybody's streams beside one another, under one login."""

    def __init__(self, requests: StreamConnection, login_text: str | None) -> None:
        self._server = StreamClient(requests)
        self._login_text = login_text

    @classmethod
    @asynccontextmanager
    async def open(
        cls, url: str, login_text: str | None = None, ca_file: Path | None = None
    ) -> AsyncIterator["SharedStreams"]:
        """`login_text` is the content of a credentials file, `user:password` or a token: for this
        operator and all jobs. Raises SettingsError when it is none of them.
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
            log.warning("job=%s/%s its streams stay behind: %s", job.namespace, job.name, error)
            return False
        return True

    async def observe(self, job: JobResource) -> StreamStatus | None:
        found = await self._server.state(_layout(job).stream("samples"))
        return None if found is None else StreamStatus(*found)

    async def sweep(self, uids: Callable[[], Collection[str]], namespaces: Collection[str]) -> int:
        return 0  # on a server of somebody else's there is no telling whose a stream is


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
