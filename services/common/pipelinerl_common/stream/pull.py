"""Reads a JetStream consumer in batches, across every reconnect."""

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final, Generic, TypeVar

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg

from pipelinerl_common.backoff import Backoff
from pipelinerl_common.errors import FatalError, PermanentError
from pipelinerl_common.service import cancel_all, check_cancelled
from pipelinerl_common.stream.connection import StreamConnection
from pipelinerl_common.stream.session import RETRYABLE

log = logging.getLogger(__name__)

_MAX_BATCH: Final = 256
_MAX_BATCH_BYTES: Final = 16 << 20
"""Below what the server holds back for a slow reader before it cuts the connection (64 MiB)."""
_EXPIRES_S: Final = 10.0
_GRACE_S: Final = 5.0
_REQUEST_OVER: Final = ("Message Size Exceeds MaxBytes", "Batch Completed")


class PullReader:
    """Hands the messages of one consumer to `handle`, batch by batch.

    `make_consumer` is called at every start and after every reconnect and returns the consumer's
    name; it decides where reading resumes. `capacity` waits until something may be read and returns
    how many messages.
    """

    def __init__(
        self,
        connection: StreamConnection,
        stream: str,
        *,
        make_consumer: Callable[[], Awaitable[str]],
        capacity: Callable[[], Awaitable[int]],
        handle: Callable[[list[Msg]], Awaitable[None]],
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._make_consumer = make_consumer
        self._capacity = capacity
        self._handle = handle
        self._received: list[Msg] = []
        self._wake = asyncio.Event()
        self._generation = 0

    async def run(self) -> None:
        """Consumes the stream and calls `handle` until cancelled. Waits for the connection, for
        `capacity` and for messages.

        Raises FatalError when another process took the consumer over, PermanentError when the
        server rejects the consumer.
        """
        backoff = Backoff(0.1, 2.0)
        async with self._connection.listening(self._wake.set):
            while True:
                check_cancelled()
                await self._connection.wait_ready()
                self._generation = self._connection.generation
                try:
                    await self._read(backoff)
                except nats.js.errors.BadRequestError as error:
                    raise PermanentError(
                        f"stream {self._stream} cannot be read: {error}"
                    ) from error
                except (nats.errors.Error, *RETRYABLE) as error:
                    log.warning("stream=%s reading starts again: %s", self._stream, error)
                    await backoff.sleep()

    @asynccontextmanager
    async def _inbox(self) -> AsyncIterator[str]:
        client = self._connection.client
        received = self._received = []

        async def on_message(message: Msg) -> None:
            received.append(message)
            self._wake.set()

        inbox = client.new_inbox()
        # No limits in the library, which would drop what exceeds them: the pull requests are the
        # limit.
        subscription = await client.subscribe(
            inbox, cb=on_message, pending_msgs_limit=0, pending_bytes_limit=0
        )
        try:
            yield inbox
        finally:
            if not client.is_closed:
                await subscription.unsubscribe()

    @property
    def _is_current(self) -> bool:
        return self._connection.generation == self._generation

    async def _read(self, backoff: Backoff) -> None:
        """Pulls with one consumer until the connection changes or the server stops responding."""
        consumer = await self._make_consumer()
        async with self._inbox() as inbox:
            backoff.reset()
            while self._is_current:
                wanted = min(await self._capacity(), _MAX_BATCH)
                await self._pull(consumer, inbox, wanted)
                if not await self._receive(wanted):
                    return

    async def _receive(self, wanted: int) -> bool:
        """Handles the answer to one pull request; False when the server does not respond."""
        # The server ends each request after _EXPIRES_S at the latest; without a word of it, either
        # the request or the answer is lost.
        deadline = asyncio.get_running_loop().time() + _EXPIRES_S + _GRACE_S
        while wanted > 0 and self._is_current:
            check_cancelled()
            messages = await self._next(deadline)
            if not messages:
                if self._is_current:
                    log.warning(
                        "stream=%s the server does not respond, reading starts again", self._stream
                    )
                return False
            data = [message for message in messages if _status(message) is None]
            statuses = [message for message in messages if _status(message) is not None]
            wanted -= len(data)
            if data:
                await self._handle(data)
            for message in statuses:
                self._check_request_ended(message)
            if statuses:
                break
        return True

    async def _pull(self, consumer: str, inbox: str, batch: int) -> None:
        max_bytes = max(_MAX_BATCH_BYTES, 2 * int(self._connection.client.max_payload))
        request = {"batch": batch, "expires": int(_EXPIRES_S * 1e9), "max_bytes": max_bytes}
        await self._connection.client.publish(
            f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{consumer}",
            json.dumps(request).encode(),
            reply=inbox,
        )

    async def _next(self, deadline: float) -> list[Msg]:
        """Messages that have arrived; none at the deadline or when the connection has changed."""
        while not self._received:
            self._wake.clear()
            if self._received or not self._is_current:
                break
            try:
                async with asyncio.timeout_at(deadline):
                    await self._wake.wait()
            except TimeoutError:
                break
        messages = self._received[:]
        self._received.clear()
        return messages

    def _check_request_ended(self, message: Msg) -> None:
        """Returns when the status message only ends the pull request, raises when it reports an
        error.
        """
        description = (message.headers or {}).get("Description", "")
        if description == "Consumer Deleted" and self._is_current:
            raise FatalError(
                f"stream {self._stream}: another process has taken over as its reader; only one "
                "may run"
            )
        if _status(message) != "408" and description not in _REQUEST_OVER:
            raise nats.errors.Error(f"pull request refused: {_status(message)} {description}")


def _status(message: Msg) -> str | None:
    if message.data or not message.headers:
        return None
    status: str | None = message.headers.get("Status")
    return status


Item = TypeVar("Item")


class Arrivals(Generic[Item]):
    """A queue from a reading task to an `async for`, which raises the task's error when the task
    has ended. Waiting for an item may be cancelled.
    """

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._arrived = asyncio.Event()
        self._taken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def filled_by(
        self, reading: Coroutine[Any, Any, None]
    ) -> AsyncIterator[AsyncIterator[Item]]:
        """Runs `reading`, which calls `put`, while the block runs."""
        self._task = asyncio.ensure_future(reading)
        self._task.add_done_callback(lambda task: self._arrived.set())
        try:
            yield self
        finally:
            await cancel_all([self._task])

    def put(self, item: Item) -> None:
        self._items.append(item)
        self._arrived.set()

    async def wait_room(self, limit: int) -> int:
        """Waits until fewer than `limit` items are queued and returns how many still fit."""
        while (room := limit - len(self._items)) <= 0:
            self._taken.clear()
            await self._taken.wait()
        return room

    def __aiter__(self) -> AsyncIterator[Item]:
        return self

    async def __anext__(self) -> Item:
        while not self._items:
            if self._task is None or self._task.done():
                if self._task is not None and not self._task.cancelled():
                    self._task.result()
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        self._taken.set()
        return self._items.popleft()
