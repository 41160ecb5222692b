"""One connection to NATS that outlives every restart of the server.

session 1 -- lost -- reconnected by the library -- given up by the library
                                                   session 2 -- lost -- ...
ready     ----------|                              |--------          generation grows at each |

Users see only that the connection is unreachable for a while and then ready again, with
`generation` one higher and the job's streams ensured.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from pipelinerl_common.backoff import Backoff
from pipelinerl_common.errors import PermanentError, Unavailable
from pipelinerl_common.service import cancel_all, check_cancelled, num_cancellations
from pipelinerl_common.stream.login import Login
from pipelinerl_common.stream.session import (
    ATTEMPT_S,
    RETRYABLE,
    NatsSession,
    ServerErrors,
    raise_api_error,
    refusal_message,
)

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_MAX_ANSWERS: Final = 1024

Prepare = Callable[["StreamConnection"], Awaitable[None]]


async def _prepare_nothing(_: "StreamConnection") -> None:
    pass


class StreamConnection:
    """A connection that reconnects until it is closed. Calls wait for it up to their deadlines."""

    def __init__(self, url: str, name: str, login: Login, counters: Counter[str]) -> None:
        self._url = url
        self._name = name
        self._login = login
        self._counters = counters
        self._errors = ServerErrors()
        self._ready = asyncio.Event()
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []
        self._closing = False
        self._session = self._new_session()
        self.generation = 0
        """Grows with every connect: messages in flight on an older one may be lost."""

    def _new_session(self) -> NatsSession:
        return NatsSession(
            self._url,
            self._name,
            self._login,
            self._errors,
            on_lost=self._on_lost,
            on_back=self._changed.set,
        )

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        url: str,
        *,
        name: str,
        login: Login,
        prepare: Prepare,
        timeout_s: float,
        counters: Counter[str],
    ) -> AsyncIterator["StreamConnection"]:
        """Connects and runs `prepare`, now and after every reconnect, each time before the
        connection becomes ready.

        Raises Unavailable when there is no usable server within `timeout_s` or when it refuses
        credentials, SettingsError when it refuses a token or a password.
        """
        connection = cls(url, name, login, counters)
        try:
            async with asyncio.timeout(timeout_s):
                await connection._connect(unless_refused=True)
                await connection._prepare_first(prepare)
        except TimeoutError as error:
            reason = connection._absence(timeout_s)
            await connection._close()
            raise Unavailable(reason) from error
        except BaseException:
            await connection._close()
            raise
        connection._become_ready()
        async with connection._supervised(prepare):
            yield connection

    @classmethod
    @asynccontextmanager
    async def open_in_background(
        cls, url: str, login: Login, *, name: str
    ) -> AsyncIterator["StreamConnection"]:
        """Connects beside the block, however long it takes until a server takes the login. For
        administration of the server: no streams are ensured.
        """
        login.options()  # raises for unusable files now, not in the background
        connection = cls(url, name, login, Counter())
        connection._changed.set()
        async with connection._supervised(_prepare_nothing):
            yield connection

    @asynccontextmanager
    async def _supervised(self, prepare: Prepare) -> AsyncIterator[None]:
        supervisor = asyncio.ensure_future(self._supervise(prepare))
        try:
            yield
        finally:
            # Before closing: the supervisor would take the close for a loss and reconnect.
            await cancel_all([supervisor])
            await self._close()

    @property
    def client(self) -> Client:
        """The library's client of the moment; another one after it has given up."""
        return self._session.client

    @property
    def jetstream(self) -> JetStreamContext:
        return self._session.jetstream

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    async def wait_ready(self) -> None:
        await self._ready.wait()

    @asynccontextmanager
    async def listening(self, listener: Callable[[], None]) -> AsyncIterator[None]:
        """Calls `listener` after every connect but the first, while the block runs."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    async def publish(
        self, subject: str, payload: bytes, headers: dict[str, str] | None, timeout_s: float
    ) -> None:
        """Publishes to a JetStream subject and waits until the server has stored it.

        Sends again while the server is unreachable or the stream is full. Raises Unavailable at the
        deadline, PermanentError when the server refuses the message as such.
        """
        await self._retrying(
            lambda limit_s: self._session.publish(subject, payload, headers, limit_s),
            subject,
            timeout_s,
        )

    async def request(self, subject: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Makes one request to JetStream's API, retried like `publish`; the answer as JSON."""

        async def attempt(limit_s: float) -> dict[str, Any]:
            message = await self.client.request(subject, json.dumps(body).encode(), timeout=limit_s)
            answer: dict[str, Any] = json.loads(message.data)
            raise_api_error(answer)
            return answer

        return await self._retrying(attempt, subject, timeout_s)

    async def ask(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        """Returns the first answer on `subject`, retried like `publish`."""

        async def attempt(limit_s: float) -> bytes:
            return bytes((await self.client.request(subject, payload, timeout=limit_s)).data)

        return await self._retrying(attempt, subject, timeout_s)

    async def ask_all(
        self,
        subject: str,
        payload: bytes,
        *,
        is_enough: Callable[[list[bytes]], bool],
        timeout_s: float,
    ) -> list[bytes]:
        """Answers of many servers, until `is_enough` or, at the latest, after `timeout_s`. Raises
        Unavailable without a connection within that time.
        """
        answers: list[bytes] = []
        enough = asyncio.Event()

        async def on_answer(message: Msg) -> None:
            if message.data and len(answers) < _MAX_ANSWERS:  # "no responders" has no data
                answers.append(message.data)
            if not message.data or is_enough(answers):
                enough.set()

        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            await self._ready_by(deadline)
        except TimeoutError as error:
            raise Unavailable(f"no connection to {self._url}{self._errors.because()}") from error
        client = self.client
        inbox = client.new_inbox()
        subscription = await client.subscribe(inbox, cb=on_answer)
        try:
            await client.publish(subject, payload, reply=inbox)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await enough.wait()
        finally:
            if not client.is_closed:
                await subscription.unsubscribe()
        return answers

    async def _ready_by(self, deadline: float) -> None:
        if not self._ready.is_set():  # most calls find it ready and need no timer
            async with asyncio.timeout_at(deadline):
                await self._ready.wait()

    async def _retrying(
        self, attempt: Callable[[float], Awaitable[Result]], what: str, timeout_s: float
    ) -> Result:
        """Repeats `attempt(limit_s)` until it succeeds, only while the connection is ready. Raises
        as `publish` does.
        """
        time = asyncio.get_running_loop().time
        deadline = time() + timeout_s
        backoff = Backoff(0.05, 2.0)
        reason = f"no answer from {self._url}; see the server's log, its disk may be full"
        cancellations = num_cancellations()
        while True:
            try:
                await self._ready_by(deadline)
                result = await attempt(min(ATTEMPT_S, max(deadline - time(), 0.0)))
                # The library's wait_for can lose a cancellation that arrives with the answer.
                check_cancelled(since=cancellations)
                return result
            except RETRYABLE as error:
                # A timeout says nothing, so that it does not replace an earlier reason.
                if not isinstance(error, TimeoutError):
                    reason = str(error)
                elif not self._ready.is_set():
                    reason = f"no connection to {self._url}{self._errors.because()}"
                self._counters["retries"] += 1
            except nats.errors.Error as error:
                raise PermanentError(f"{what}: refused by the stream's server: {error}") from error
            delay_s = backoff.next_delay()
            if time() + delay_s > deadline:
                raise Unavailable(f"{what}: not done within {timeout_s:g} s: {reason}")
            await asyncio.sleep(delay_s)

    async def _connect(self, *, unless_refused: bool) -> None:
        session = self._new_session()
        await session.connect(unless_refused=unless_refused)
        self._session = session

    async def _prepare_first(self, prepare: Prepare) -> None:
        while True:
            try:
                return await prepare(self)
            except RETRYABLE as error:
                self._errors.note(error)
                log.info("nats is not usable yet, trying again: %s", error)
            await asyncio.sleep(0.5)

    async def _supervise(self, prepare: Prepare) -> None:
        """Makes the connection ready again after each change, until cancelled. Woken by the
        session's `on_lost` and `on_back`.
        """
        while True:
            check_cancelled()
            await self._changed.wait()
            self._changed.clear()
            try:
                if not self._session.is_usable:
                    await self._connect(unless_refused=False)
                if not self.client.is_connected:
                    continue  # the library reconnects, and `on_back` follows
                await prepare(self)
            except Exception as error:  # noqa: BLE001 - whatever it is, the service needs the connection
                log.warning("nats is not usable yet, trying again: %r", error)
                await asyncio.sleep(1.0)
                self._changed.set()
                continue
            # It may have been lost while it was prepared; then `on_lost` has set `_changed` again.
            if self.client.is_connected:
                self._become_ready()

    def _on_lost(self) -> None:
        self._ready.clear()
        self._changed.set()
        if not self._closing:
            log.warning("the connection to nats is lost, waiting for it")

    def _become_ready(self) -> None:
        self.generation += 1
        self._ready.set()
        if self.generation == 1:
            return
        self._counters["reconnects"] += 1
        log.info("connected to nats again")
        for listener in tuple(self._listeners):
            listener()

    def _absence(self, timeout_s: float) -> str:
        """Why there is no usable connection after `timeout_s`, and what to do."""
        because = self._errors.because()
        if self._errors.refusal is not None:
            return refusal_message(self._url, self._login)
        if self.client.is_connected:
            return (
                f"nats-server at {self._url} gives no streams within {timeout_s:g} s{because}; "
                "is its JetStream on, has its store room for them?"
            )
        return (
            f"no nats-server at {self._url} within {timeout_s:g} s; is it running, is the "
            f"address right?{because}"
        )

    async def _close(self) -> None:
        self._closing = True
        self._ready.clear()
        await self._session.close()
