"""A small durable map from keys to bytes, one writer: the ledger's memory."""

import asyncio

from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig

from pipelinerl_common.errors import Unavailable
from pipelinerl_common.service import cancel_all
from pipelinerl_common.stream.connection import Connection
from pipelinerl_common.stream.layout import Layout
from pipelinerl_common.stream.pull import PullReader


class Journal:
    """A JetStream key-value bucket. Every method waits for the server, up to its `timeout_s`, then
    raises Unavailable.
    """

    def __init__(self, connection: Connection, layout: Layout) -> None:
        self._connection = connection
        self._layout = layout

    async def put(self, key: str, value: bytes, timeout_s: float = 60.0) -> None:
        """Sets `key`; durable when this returns. Raises ValueError for a key other than letters,
        digits and - / _ = .
        """
        await self._connection.publish(self._layout.journal_subject(key), value, None, timeout_s)

    async def delete(self, key: str, timeout_s: float = 60.0) -> None:
        """Forgets `key`, leaving no marker behind, so that the bucket does not grow with its
        history.
        """
        subject = self._layout.journal_subject(key)
        await self._connection.request(
            f"$JS.API.STREAM.PURGE.{self._layout.journal_stream}", {"filter": subject}, timeout_s
        )

    async def entries(self, timeout_s: float = 60.0) -> dict[str, bytes]:
        """Everything that is in the bucket."""
        entries: dict[str, bytes] = {}
        complete = asyncio.Event()
        num_missing = 0

        async def make_consumer() -> str:
            nonlocal num_missing
            entries.clear()
            info = await self._connection.jetstream.add_consumer(
                self._layout.journal_stream, _ONCE_THROUGH
            )
            num_missing = info.num_pending
            if num_missing == 0:
                complete.set()
            return str(info.name)

        async def handle(messages: list[Msg]) -> None:
            nonlocal num_missing
            for message in messages:
                entries[self._layout.journal_key(message.subject)] = message.data
            num_missing -= len(messages)
            if num_missing <= 0:
                complete.set()

        async def capacity() -> int:
            return 256

        stream = self._layout.journal_stream
        reader = PullReader(
            self._connection, stream, make_consumer=make_consumer, capacity=capacity, handle=handle
        )
        reading = asyncio.ensure_future(reader.run())
        waiting = asyncio.ensure_future(complete.wait())
        try:
            await asyncio.wait(
                [reading, waiting], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if reading.done():
                reading.result()
            if not waiting.done():
                raise Unavailable(f"journal of {self._layout.job}: not read within {timeout_s:g} s")
        finally:
            await cancel_all([reading, waiting])
        return entries


_ONCE_THROUGH = ConsumerConfig(ack_policy=AckPolicy.NONE, inactive_threshold=60.0, mem_storage=True)
