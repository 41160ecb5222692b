"""One connection to NATS that outlives every restart of the server.

The client library reconnects by itself after most faults and gives up for good after some (for
example when the server is too busy to authenticate in time). Here both look the same: the
connection is away for a while and then ready again, with
`generation` one higher and the job's streams made sure of.
"""

import asyncio
import json
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js import JetStreamContext

from pipelinerl_common.errors import PermanentError, SettingsError, Unavailable
from pipelinerl_common.service import cancel_all, check_cancelled, num_cancellations
from pipelinerl_common.stream.acks import MAX_WAITING_BYTES, AckedPublisher
from pipelinerl_common.stream.login import Login

log = logging.getLogger(__name__)

Result = TypeVar("Result")

ATTEMPT_S: Final = 5.0
"""Longest wait for one answer of the server before the request is sent again."""

_FIRST_BACKOFF_S: Final = 0.05
_MAX_BACKOFF_S: Final = 2.0

RETRYABLE: Final[tuple[type[Exception], ...]] = (
    nats.errors.TimeoutError,
    nats.errors.NoRespondersError,
    nats.errors.ConnectionClosedError,
    nats.errors.OutboundBufferLimitError,
    nats.errors.StaleConnectionError,
    nats.errors.FlushTimeoutError,
    nats.js.errors.NoStreamResponseError,
    nats.js.errors.ServiceUnavailableError,
    nats.js.errors.ServerError,
    nats.js.errors.NotFoundError,
    OSError,
    TimeoutError,
)
"""What passes when the server is back, has room again, or has its streams again."""


class StreamConnection:
    def __init__(self, url: str, name: str, login: Login, counters: Counter[str]) -> None:
        self._url = url
        self._name = name
        self._login = login
        self._counters = counters
        self._refusal: str | None = None
        self._last_error: str | None = None
        self._ready = asyncio.Event()
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []
        self._closing = False
        self._acks = AckedPublisher()
        self.client = Client()
        """The library's client of the moment; another one after it has given up."""
        self.jetstream: JetStreamContext = self.client.jetstream(timeout=ATTEMPT_S)
        self.generation = 0
        """Grows with every connect: what was on its way on an older one may be lost."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        url: str,
        *,
        name: str,
        login: Login,
        prepare: Callable[["StreamConnection"], Awaitable[None]],
        timeout_s: float,
        counters: Counter[str],
    ) -> AsyncIterator["StreamConnection"]:
        """Connects and runs `prepare`, now and after every reconnect, before anyone is told that
        the connection is ready.

        Raises Unavailable when there is no usable server within `timeout_s` or when it refuses
        credentials, SettingsError when it refuses a token or a password.
        """
        connection = cls(url, name, login, counters)
        try:
            async with asyncio.timeout(timeout_s):
                await connection._connect(first=True)
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
        cls, url: str, *, name: str, login: Login, counters: Counter[str]
    ) -> AsyncIterator["StreamConnection"]:
        """A connection that is made beside the block, whenever a server is there and takes the
        login.
        """

        async def prepare(_: "StreamConnection") -> None:
            pass

        login.options()  # so that files which cannot be used are told at once
        connection = cls(url, name, login, counters)
        connection._changed.set()
        async with connection._supervised(prepare):
            yield connection

    @asynccontextmanager
    async def _supervised(
        self, prepare: Callable[["StreamConnection"], Awaitable[None]]
    ) -> AsyncIterator[None]:
        supervisor = asyncio.ensure_future(self._supervise(prepare))
        try:
            yield
        finally:
            await cancel_all([supervisor])
            await self._close()

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    async def wait_ready(self) -> None:
        await self._ready.wait()

    @asynccontextmanager
    async def listening(self, listener: Callable[[], None]) -> AsyncIterator[None]:
        """Calls `listener` after every reconnect while the block runs."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    async def publish(
        self, subject: str, payload: bytes, headers: dict[str, str] | None, timeout_s: float
    ) -> None:
        """Publishes to a JetStream subject and waits until the server has stored it.

        Sends again while the server is away or the stream is full. Raises Unavailable at the
        deadline, PermanentError when the server refuses the message as such.
        """
        await self._retrying(
            lambda limit_s: self._acks.publish(subject, payload, headers, limit_s),
            subject,
            timeout_s,
        )

    async def request(self, subject: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """One request to JetStream's API, retried like `publish`; the answer as JSON."""

        async def attempt(limit_s: float) -> dict[str, Any]:
            message = await self.client.request(subject, json.dumps(body).encode(), timeout=limit_s)
            answer: dict[str, Any] = json.loads(message.data)
            if "error" in answer:
                nats.js.errors.APIError.from_error(answer["error"])  # raises the error's own class
            return answer

        return await self._retrying(attempt, subject, timeout_s)

    async def ask(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        """One request to whoever answers on `subject`, retried like `publish`."""

        async def attempt(limit_s: float) -> bytes:
            return bytes((await self.client.request(subject, payload, timeout=limit_s)).data)

        return await self._retrying(attempt, subject, timeout_s)

    async def ready_client(self, deadline: float) -> Client:
        """The library's client once it is ready; `deadline` on the loop's clock. Raises
        Unavailable.
        """
        try:
            async with asyncio.timeout_at(deadline):
                await self._ready.wait()
        except TimeoutError as error:
            raise Unavailable(f"no connection to {self._url}{self._because()}") from error
        return self.client

    async def _retrying(
        self, attempt: Callable[[float], Awaitable[Result]], what: str, timeout_s: float
    ) -> Result:
        """`attempt(limit_s)` until it passes, only while the connection is ready. Raises as
        `publish` does.
        """
        time = asyncio.get_running_loop().time
        deadline = time() + timeout_s
        backoff_s = _FIRST_BACKOFF_S
        reason = f"no answer from {self._url}; see the server's log, its disk may be full"
        cancellations = num_cancellations()
        while True:
            try:
                if not self._ready.is_set():
                    async with asyncio.timeout_at(deadline):
                        await self._ready.wait()
                result = await attempt(min(ATTEMPT_S, max(deadline - time(), 0.0)))
                check_cancelled(since=cancellations)
                return result
            except RETRYABLE as error:
                if not isinstance(
                    error, TimeoutError
                ):  # which tells nothing, and nothing new of an earlier reason
                    reason = str(error)
                elif not self._ready.is_set():
                    reason = f"no connection to {self._url}{self._because()}"
                self._counters["retries"] += 1
            except nats.errors.Error as error:
                raise PermanentError(f"{what}: refused by the stream's server: {error}") from error
            if time() + backoff_s > deadline:
                raise Unavailable(f"{what}: not done within {timeout_s:g} s: {reason}")
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _connect(self, first: bool) -> None:
        """A client that has connected. Tries for ever, except that the first time a refusal that
        cannot pass ends it.
        """
        client = Client()
        refused = asyncio.get_running_loop().create_future()

        async def on_error(error: Exception) -> None:
            expected = isinstance(error, nats.errors.Error | OSError | TimeoutError)
            log.log(
                logging.DEBUG if expected else logging.ERROR,
                "nats client: %r",
                error,
                exc_info=None if expected else error,
            )
            self._last_error = str(error) or repr(error)
            if _is_refusal(error):
                self._refusal = self._last_error
                if not self._login.has_credentials and not refused.done():
                    refused.set_result(None)
            elif "permissions violation" in str(error).lower():
                log.warning("nats refuses what is not among this login's rights: %s", error)

        async def on_lost() -> None:
            self._ready.clear()
            self._acks.fail_all()
            self._changed.set()
            if not self._closing:
                log.warning("the connection to nats is lost, waiting for it")

        async def on_back() -> None:
            self._changed.set()

        connecting = asyncio.ensure_future(
            client.connect(
                self._url,
                name=self._name,
                error_cb=on_error,
                disconnected_cb=on_lost,
                closed_cb=on_lost,
                reconnected_cb=on_back,
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.2,
                connect_timeout=5,
                ping_interval=20,
                pending_size=2
                * MAX_WAITING_BYTES,  # never reached: beyond it publishing waits for the server
                flush_timeout=ATTEMPT_S,
                **self._login.options(),
            )
        )
        try:
            await asyncio.wait(
                [connecting, refused] if first else [connecting],
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not connecting.done():
                raise SettingsError(self._refused())
            connecting.result()
        except BaseException:
            await _end(connecting)
            await _close_client(client)
            raise
        self._refusal = self._last_error = None
        self.client = client
        self.jetstream = client.jetstream(timeout=ATTEMPT_S)
        await self._acks.attach(client)

    async def _prepare_first(
        self, prepare: Callable[["StreamConnection"], Awaitable[None]]
    ) -> None:
        while True:
            try:
                return await prepare(self)
            except RETRYABLE as error:
                self._last_error = str(error) or repr(error)
                log.info("nats is not usable yet, trying again: %s", error)
            await asyncio.sleep(_MAX_BACKOFF_S / 4)

    async def _supervise(self, prepare: Callable[["StreamConnection"], Awaitable[None]]) -> None:
        while True:
            check_cancelled()
            await self._changed.wait()
            self._changed.clear()
            try:
                if self.client.is_closed or not _was_connected(self.client):
                    await self._connect(first=False)
                if not self.client.is_connected:
                    continue  # the library is at it and will tell
                await prepare(self)
            except Exception as error:  # noqa: BLE001 - whatever it is, giving up would leave the service deaf
                log.warning("nats is not usable yet, trying again: %r", error)
                await asyncio.sleep(_MAX_BACKOFF_S / 2)
                self._changed.set()
                continue
            if self.client.is_connected:
                self._become_ready()

    def _become_ready(self) -> None:
        self.generation += 1
        self._ready.set()
        if self.generation == 1:
            return
        self._counters["reconnects"] += 1
        log.info("connected to nats again")
        for listener in tuple(self._listeners):
            listener()

    def _refused(self) -> str:
        return f"nats-server at {self._url} refuses {self._login.remedy}"

    def _absence(self, timeout_s: float) -> str:
        """Why there is no usable connection after `timeout_s`, and what to do."""
        if self._refusal is not None:
            return self._refused()
        if self.client.is_connected:
            return (
                f"nats-server at {self._url} gives no streams within {timeout_s:g} "
                f"s{self._because()}; "
                "is its JetStream on, has its store room for them?"
            )
        return (
            f"no nats-server at {self._url} within {timeout_s:g} s; is it running, is the "
            f"address right?{self._because()}"
        )

    def _because(self) -> str:
        error = (
            self._refusal or self._last_error
        )  # a reset connection follows on a refusal and says less
        return "" if error is None else f" (last error: {error})"

    async def _close(self) -> None:
        self._closing = True
        self._ready.clear()
        await _close_client(self.client)


def _is_refusal(error: Exception) -> bool:
    text = str(error).lower()
    return "authorization violation" in text or "authentication expired" in text


def _was_connected(client: Client) -> bool:
    return client._flush_queue is not None  # which it makes when it is told to connect


async def _close_client(client: Client) -> None:
    if not _was_connected(client):  # its close would trip over that
        return
    try:
        async with asyncio.timeout(ATTEMPT_S):
            if client.is_connected:
                await client.flush()
            await client.close()
    except (nats.errors.Error, *RETRYABLE) as error:
        log.debug("closing nats: %r", error)
    if client._reconnection_task is not None:  # which would go on for ever, closed or not
        await _end(client._reconnection_task)


async def _end(task: "asyncio.Task[Any]") -> None:
    """Cancels a task of the library until it has ended: it may lose a cancellation, see
    `check_cancelled`.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=0.1)
