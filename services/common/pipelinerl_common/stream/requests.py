"""Requests to the stream's server itself, for whoever administers it: no streams of one's own."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Final

from nats.aio.msg import Msg

from pipelinerl_common.stream.connection import StreamConnection
from pipelinerl_common.stream.login import Login

_MAX_ANSWERS: Final = 1024


class ServerRequests:
    """Raw requests, retried while the server is away, up to each call's deadline."""

    def __init__(self, connection: StreamConnection) -> None:
        self._connection = connection

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, login: Login, *, name: str) -> AsyncIterator["ServerRequests"]:
        """Connects beside the block, however long it takes; requests wait for it up to their own
        deadlines.
        """
        async with StreamConnection.open_in_background(
            url, name=name, login=login, counters=Counter()
        ) as connection:
            yield cls(connection)

    @property
    def is_connected(self) -> bool:
        return self._connection.is_ready

    @property
    def generation(self) -> int:
        """Grows with every connect, the first one included: the server may have forgotten what it
        was told before.
        """
        return self._connection.generation

    def reconnecting(self, listener: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        """Calls `listener` after every connect but the first, while the block runs."""
        return self._connection.listening(listener)

    async def ask(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        """The first answer. Raises Unavailable at the deadline."""
        return await self._connection.ask(subject, payload, timeout_s)

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
        client = await self._connection.ready_client(deadline)
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
