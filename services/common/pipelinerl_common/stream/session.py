"""One life of the NATS client library's connection: from its connect until it gives up for good.

The library reconnects by itself after most faults and gives up after some, for example when the
server is too busy to authenticate in time. `StreamConnection` follows one session by another.
"""

import asyncio
import json
import logging
from collections.abc import Callable
from itertools import count
from typing import Any, Final

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.stream.login import Login

log = logging.getLogger(__name__)

ATTEMPT_S: Final = 5.0
"""Longest wait for one answer of the server before the request is sent again."""
MAX_WAITING_BYTES: Final = 64 << 20
"""Largest backlog of published bytes that have not gone out because the server does not read.
Nothing more is published beyond it.
"""
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
"""Errors that pass when the server is back, has room again, or has its streams again."""


def check_room(client: Client) -> None:
    """Raises OutboundBufferLimitError where the client would otherwise buffer without a bound, or
    wait without a deadline.
    """
    if client.pending_data_size > MAX_WAITING_BYTES:
        raise nats.errors.OutboundBufferLimitError


class ServerErrors:
    """The newest errors of a server, over all sessions of one connection."""

    def __init__(self) -> None:
        self.refusal: str | None = None
        """The newest refusal of the login."""
        self._last: str | None = None

    def note(self, error: Exception) -> None:
        self._last = str(error) or repr(error)
        if is_refusal(error):
            self.refusal = self._last

    def clear(self) -> None:
        self.refusal = self._last = None

    def because(self) -> str:
        """The end of a message about a missing connection. A refusal comes first: the connection
        reset that follows it says less.
        """
        error = self.refusal or self._last
        return "" if error is None else f" (last error: {error})"


class NatsSession:
    """A client of the library with the acknowledgements of what it publishes to JetStream.

    One subscription takes all acknowledgements. Publishes that wait for one fail as soon as the
    connection is lost, instead of by their timeout.
    """

    def __init__(
        self,
        url: str,
        name: str,
        login: Login,
        errors: ServerErrors,
        *,
        on_lost: Callable[[], None],
        on_back: Callable[[], None],
    ) -> None:
        """`on_lost` is called when the connection breaks or ends, `on_back` after each reconnect by
        the library.
        """
        self.client = Client()
        self.jetstream = self.client.jetstream(timeout=ATTEMPT_S)
        self._url = url
        self._name = name
        self._login = login
        self._errors = errors
        self._notify_lost = on_lost
        self._notify_back = on_back
        self._refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inbox = ""
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def connect(self, *, unless_refused: bool) -> None:
        """Connects as soon as a server takes the login. With `unless_refused` a refusal that cannot
        pass by itself raises SettingsError; otherwise attempts continue until cancelled.
        """
        connecting = asyncio.ensure_future(
            self.client.connect(
                self._url,
                name=self._name,
                error_cb=self._on_error,
                disconnected_cb=self._on_lost,
                closed_cb=self._on_lost,
                reconnected_cb=self._on_back,
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.2,
                connect_timeout=5,
                ping_interval=20,
                # Never reached: check_room stops publishing before the library would block it.
                pending_size=2 * MAX_WAITING_BYTES,
                flush_timeout=ATTEMPT_S,
                **self._login.options(),
            )
        )
        waited_for = [connecting, self._refused] if unless_refused else [connecting]
        try:
            await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                raise SettingsError(refusal_message(self._url, self._login))
            connecting.result()
            self._errors.clear()
            self._inbox = self.client.new_inbox()
            await self.client.subscribe(
                self._inbox + ".*", cb=self._on_ack, pending_msgs_limit=0, pending_bytes_limit=0
            )
        except BaseException:
            # The library retries a refused login indefinitely; nothing may outlive this call.
            await _end(connecting)
            await self.close()
            raise

    @property
    def is_usable(self) -> bool:
        """Whether the library still keeps this session connected or reconnects it by itself."""
        return self._has_connected and not self.client.is_closed

    async def publish(
        self, subject: str, payload: bytes, headers: dict[str, str] | None, timeout_s: float
    ) -> None:
        """Returns when the server has stored the message. Raises the NATS client's errors,
        TimeoutError among them.
        """
        check_room(self.client)
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        acknowledged = self._waiting[number] = loop.create_future()
        # One timer per message: thousands of outstanding wait_for calls would cost a task each.
        timer = loop.call_later(timeout_s, self._fail, number, nats.errors.TimeoutError())
        try:
            await self.client.publish(
                subject, payload, reply=f"{self._inbox}.{number}", headers=headers
            )
            await acknowledged
        finally:
            timer.cancel()
            del self._waiting[number]

    async def close(self) -> None:
        """Flushes and closes the client; does nothing when it was never asked to connect."""
        if not self._has_connected:  # the library's close would fail on its missing queue
            return
        try:
            async with asyncio.timeout(ATTEMPT_S):
                if self.client.is_connected:
                    await self.client.flush()
                await self.client.close()
        except (nats.errors.Error, *RETRYABLE) as error:
            log.debug("closing nats: %r", error)
        # Closing does not always end the library's reconnection, which then runs indefinitely.
        if self.client._reconnection_task is not None:
            await _end(self.client._reconnection_task)

    @property
    def _has_connected(self) -> bool:
        return self.client._flush_queue is not None  # which the library makes in `connect`

    async def _on_error(self, error: Exception) -> None:
        expected = isinstance(error, nats.errors.Error | OSError | TimeoutError)
        log.log(
            logging.DEBUG if expected else logging.ERROR,
            "nats client: %r",
            error,
            exc_info=None if expected else error,
        )
        self._errors.note(error)
        # A server may learn of the account behind credentials later; a wrong token stays wrong.
        if is_refusal(error) and not self._login.has_credentials and not self._refused.done():
            self._refused.set_result(None)
        if "permissions violation" in str(error).lower():
            log.warning("nats refuses what is not among this login's rights: %s", error)

    async def _on_lost(self) -> None:
        for number in self._waiting:
            self._fail(number, nats.errors.ConnectionClosedError())
        self._notify_lost()

    async def _on_back(self) -> None:
        self._notify_back()

    async def _on_ack(self, message: Msg) -> None:
        future = self._waiting.get(int(message.subject.rpartition(".")[2]))
        if future is None or future.done():
            return
        if message.headers:  # "no responders": JetStream is not up yet or the stream is missing
            future.set_exception(nats.js.errors.NoStreamResponseError())
        elif b'"error"' in message.data:
            try:
                raise_api_error(json.loads(message.data))
            except nats.js.errors.APIError as error:
                future.set_exception(error)
        else:
            future.set_result(None)

    def _fail(self, number: int, error: Exception) -> None:
        future = self._waiting[number]
        if not future.done():
            future.set_exception(error)
            # Counts as retrieved: the publisher may be cancelled before it awaits the future.
            future.exception()


def raise_api_error(answer: dict[str, Any]) -> None:
    """Raises the library's own class for an error in an answer of JetStream's API."""
    if "error" in answer:
        nats.js.errors.APIError.from_error(answer["error"])


def is_refusal(error: Exception) -> bool:
    """Whether the server refuses the login; the library has no class of its own for it."""
    text = str(error).lower()
    return "authorization violation" in text or "authentication expired" in text


def refusal_message(url: str, login: Login) -> str:
    return f"nats-server at {url} refuses {login.remedy}"


async def _end(task: "asyncio.Task[Any]") -> None:
    """Cancels a task of the library again and again until it has ended: one cancellation can get
    lost, see `check_cancelled`.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=0.1)
