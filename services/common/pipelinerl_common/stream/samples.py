"""The reading side of the sample stream: joins parts into groups, sets aside what is broken."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

import nats.js.errors
from nats.aio.msg import Msg

from pipelinerl_common.codec import GroupJoiner, GroupPart, PartKey, decode_part, encode_group
from pipelinerl_common.errors import MalformedMessage, Unavailable
from pipelinerl_common.stream.connection import Connection
from pipelinerl_common.stream.deliveries import Deliveries, Delivery
from pipelinerl_common.stream.layout import CONSUMER, Layout
from pipelinerl_common.stream.pull import Arrivals, PullReader
from pipelinerl_common.tracing import TRACEPARENT
from pipelinerl_common.types import SampleGroup

log = logging.getLogger(__name__)

SetAside = Callable[[bytes, str, str], Awaitable[None]]
"""Payload, reason in a word, detail."""

_CONFIRM_S: Final = 5.0


@dataclass(slots=True, eq=False)
class ReceivedGroup:
    """A group from the stream. One of `ack`, `retry_later` or `Stream.set_aside` is due; a second
    call does nothing.
    """

    group: SampleGroup
    _reader: "SampleReader" = field(repr=False)
    _deliveries: list[Delivery] = field(repr=False)
    traceparent: str = ""
    """Trace context of its publication; empty when the group is not traced."""

    @property
    def num_messages(self) -> int:
        """Messages that it came in."""
        return len(self._deliveries)

    async def ack(self) -> None:
        """The group is used: all its parts leave the stream. Returns at once; sent again after a
        reconnect until the server confirms. Only a crash before the confirmation can bring the
        group back, at the next start.
        """
        await self._reader.settle(self, put_back=False)

    async def retry_later(self) -> None:
        """Puts the group back: it is delivered again after some seconds."""
        await self._reader.settle(self, put_back=True)


class SampleReader:
    """Delivers whole groups, at most `max_pending` unsettled at a time."""

    def __init__(
        self,
        connection: Connection,
        layout: Layout,
        max_pending: int,
        set_aside: SetAside,
        counters: Counter[str],
    ) -> None:
        self._connection = connection
        self._layout = layout
        self._max_pending = max_pending
        self._set_aside = set_aside
        self._counters = counters
        self._deliveries = Deliveries(connection, counters)
        self._joiner = GroupJoiner(on_evict=self._on_evicted)
        self._parts: dict[PartKey, list[Delivery]] = {}
        self._evicted: list[tuple[PartKey, list[GroupPart]]] = []
        self._open: dict[PartKey, ReceivedGroup] = {}
        self._room = asyncio.Event()
        self._arrivals: Arrivals[ReceivedGroup] = Arrivals()  # holds no more than _open does
        self._stream_created = ""

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncIterator[ReceivedGroup]]:
        """Groups as they arrive. What an earlier reader left unacknowledged comes first."""
        reader = PullReader(
            self._connection,
            self._layout.stream("samples"),
            make_consumer=self._make_consumer,
            capacity=self._capacity,
            handle=self._handle,
        )
        async with self._arrivals.filled_by(reader.run()) as groups:
            try:
                yield groups
            finally:
                try:
                    await self._deliveries.wait_confirmed(_CONFIRM_S)
                except TimeoutError:
                    log.warning(
                        "the last acknowledgements are unconfirmed: their groups may come again at "
                        "the next start"
                    )

    async def settle(self, received: ReceivedGroup, *, put_back: bool) -> None:
        """Ends a group's account, once."""
        key = PartKey(received.group.group_id, received.group.attempt)
        if self._open.get(key) is not received:
            return
        del self._open[key]
        self._room.set()
        for delivery in received._deliveries:
            await (
                self._deliveries.put_back(delivery) if put_back else self._deliveries.ack(delivery)
            )

    async def _make_consumer(self) -> str:
        """A consumer that starts from the oldest unacknowledged message: an existing one still
        counts as delivered what was lost with its reader or with the connection.
        """
        jetstream, stream = self._connection.jetstream, self._layout.stream("samples")
        with suppress(nats.js.errors.NotFoundError):
            await jetstream.delete_consumer(stream, CONSUMER)
        created = str((await jetstream.stream_info(stream)).created)
        if self._stream_created not in ("", created):
            log.error("the sample stream was made anew: what was on it is lost")
            self._deliveries.forget_all()
        self._stream_created = created
        await jetstream.add_consumer(stream, self._layout.sample_consumer())
        await self._deliveries.restart()
        return CONSUMER

    async def _capacity(self) -> int:
        while (free := self._max_pending - len(self._open)) <= 0:
            self._room.clear()
            await self._room.wait()
        return free

    async def _handle(self, messages: list[Msg]) -> None:
        for message in messages:
            delivery = await self._deliveries.accept(_stream_sequence(message.reply), message.reply)
            if delivery is None:
                continue
            try:
                await self._receive(message, delivery)
            except MalformedMessage as error:
                await self._move_aside([message.data], error.reason, str(error), [delivery])
        while self._evicted:
            key, parts = self._evicted.pop()
            detail = f"{len(parts)} of {parts[0].num_parts} parts of attempt {key.attempt} came"
            limit = self._connection.client.max_payload
            payloads = [
                encoded.payload for part in parts for encoded in encode_group(part.header, limit)
            ]
            await self._move_aside(payloads, "incomplete", detail, self._parts.pop(key, []))

    async def _receive(self, message: Msg, delivery: Delivery) -> None:
        part = decode_part(message.data)
        if part.header.job != self._layout.job:
            raise MalformedMessage(
                f"job={part.header.job!r} on the stream of {self._layout.job!r}", "job"
            )
        key = PartKey(part.header.group_id, part.header.attempt)
        if key in self._open:
            self._counters["duplicates"] += 1
            await self._deliveries.ack(delivery)
            return
        group = self._joiner.add(part)
        deliveries = self._parts.setdefault(key, [])
        deliveries.append(delivery)
        if group is None:
            return
        del self._parts[key]
        received = self._open[key] = ReceivedGroup(
            group, self, deliveries, (message.headers or {}).get(TRACEPARENT, "")
        )
        self._arrivals.put(received)

    def _on_evicted(self, key: PartKey, parts: list[GroupPart]) -> None:
        self._evicted.append((key, parts))

    async def _move_aside(
        self, payloads: list[bytes], reason: str, detail: str, deliveries: list[Delivery]
    ) -> None:
        try:
            for payload in payloads:
                await self._set_aside(payload, reason, detail)
        except Unavailable as error:
            log.warning("set aside later: %s", error)
            for delivery in deliveries:
                await self._deliveries.put_back(delivery)
        else:
            for delivery in deliveries:
                await self._deliveries.ack(delivery)


def _stream_sequence(reply: str) -> int:
    """From "$JS.ACK.<stream>.<consumer>.<delivered>.<stream sequence>...", with two more tokens
    first on newer servers.
    """
    tokens = reply.split(".")
    return int(tokens[5] if len(tokens) == 9 else tokens[7])
