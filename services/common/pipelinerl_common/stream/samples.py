"""The reading side of the sample stream: joins parts, keeps account of what is unacknowledged, sets aside what is broken."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from pipelinerl_common.codec import GroupJoiner, GroupPart, PartKey, decode_part, encode_group
from pipelinerl_common.errors import MalformedMessage
from pipelinerl_common.stream.connection import RETRYABLE, Connection
from pipelinerl_common.stream.layout import CONSUMER, Layout
from pipelinerl_common.stream.pull import Arrivals, PullReader
from pipelinerl_common.types import SampleGroup

log = logging.getLogger(__name__)

SetAside = Callable[[bytes, str, str], Awaitable[None]]
"""Payload, reason in a word, detail."""

_CONFIRM_S: Final = 5.0
_MAX_CONFIRMED: Final = 1 << 16
"""Newest acknowledged messages that are remembered."""
_RETRY_LATER_NS: Final = 2_000_000_000


@dataclass(slots=True, eq=False)
class _Delivery:
    """One message that the server has handed out and that is not known to be gone from the stream."""

    sequence: int
    reply: str
    """Where to acknowledge; empty when the message went with the server's disk."""
    key: PartKey | None = None
    acked: bool = False


@dataclass(slots=True, eq=False)
class ReceivedGroup:
    """A group from the stream. One of `ack`, `retry_later` or `Stream.set_aside` is due; a second call does nothing."""

    group: SampleGroup
    _reader: "SampleReader" = field(repr=False)
    _deliveries: list[_Delivery] = field(repr=False)

    async def ack(self) -> None:
        """The group is used: all its parts leave the stream. Returns at once; sent again after a reconnect until the server
        confirms. Only a crash before the confirmation can bring the group back, at the next start."""
        await self._reader.settle(self, acked=True)

    async def retry_later(self) -> None:
        """Puts the group back: it is delivered again after some seconds."""
        await self._reader.settle(self, acked=False)


class SampleReader:
    """Delivers whole groups, at most `max_pending` unsettled at a time."""

    def __init__(
        self, connection: Connection, layout: Layout, max_pending: int, set_aside: SetAside, counters: Counter[str]
    ) -> None:
        self._connection = connection
        self._layout = layout
        self._max_pending = max_pending
        self._set_aside = set_aside
        self._counters = counters
        self._joiner = GroupJoiner(on_evict=self._on_evicted)
        self._deliveries: dict[int, _Delivery] = {}
        self._confirmed: dict[int, None] = {}
        self._parts: dict[PartKey, list[_Delivery]] = {}
        self._evicted: list[tuple[PartKey, list[GroupPart]]] = []
        self._open: dict[PartKey, ReceivedGroup] = {}
        self._room = asyncio.Event()
        self._room.set()
        self._settled = asyncio.Event()
        self._arrivals: Arrivals[ReceivedGroup] = Arrivals()  # holds no more than _open does
        self._confirm_inbox = ""
        self._stream_created = ""
        self._confirming: Subscription | None = None

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
                await self._wait_confirmed()

    async def _make_consumer(self) -> str:
        """A consumer that starts from the oldest unacknowledged message: an existing one still counts as delivered what was
        lost with its reader or with the connection."""
        jetstream, stream = self._connection.jetstream, self._layout.stream("samples")
        with suppress(nats.js.errors.NotFoundError):
            await jetstream.delete_consumer(stream, CONSUMER)
        await self._check_same_stream()
        await jetstream.add_consumer(stream, self._layout.sample_consumer())
        await self._listen_for_confirmations()
        for delivery in [each for each in self._deliveries.values() if each.acked]:
            await self._send_ack(delivery)
        return CONSUMER

    async def _check_same_stream(self) -> None:
        """A server that lost its disk numbers messages anew: acknowledging an old number would remove a new message."""
        info = await self._connection.jetstream.stream_info(self._layout.stream("samples"))
        created = str(info.created)
        if self._stream_created not in ("", created):
            log.error("the sample stream was made anew: what was on it is lost (%d messages known here)", len(self._deliveries))
            self._counters["lost"] += len(self._deliveries)
            for delivery in self._deliveries.values():
                delivery.reply = ""
            self._deliveries.clear()
            self._confirmed.clear()
        self._stream_created = created

    async def _listen_for_confirmations(self) -> None:
        client, older = self._connection.client, self._confirming
        self._confirm_inbox = client.new_inbox()
        self._confirming = await client.subscribe(self._confirm_inbox + ".*", cb=self._on_confirmed)
        if older is not None:
            with suppress(nats.errors.Error):  # its client may be gone
                await older.unsubscribe()

    async def _capacity(self) -> int:
        while (free := self._max_pending - len(self._open)) <= 0:
            self._room.clear()
            await self._room.wait()
        return free

    async def _handle(self, messages: list[Msg]) -> None:
        for message in messages:
            try:
                await self._receive(message)
            except MalformedMessage as error:
                await self._reject(message, error)
        while self._evicted:
            await self._give_up(*self._evicted.pop())

    async def _give_up(self, key: PartKey, parts: list[GroupPart]) -> None:
        detail = f"{len(parts)} of {parts[0].num_parts} parts of attempt {key.attempt} came"
        for part in parts:
            for encoded in encode_group(part.header, self._connection.client.max_payload):
                await self._set_aside(encoded.payload, "incomplete", detail)
        for delivery in self._parts.pop(key, []):
            await self._ack(delivery)

    async def _receive(self, message: Msg) -> None:
        sequence = _stream_sequence(message.reply)
        known = self._deliveries.get(sequence)
        if known is not None:
            known.reply = message.reply
            self._counters["redelivered"] += 1
            if known.acked:
                await self._send_ack(known)
            return
        if sequence in self._confirmed:  # a server that was killed forgets the last removals
            self._counters["redelivered"] += 1
            await self._ack(self._deliveries.setdefault(sequence, _Delivery(sequence, message.reply)))
            return
        part = decode_part(message.data)
        if part.header.job != self._layout.job:
            raise MalformedMessage(f"job={part.header.job!r} on the stream of {self._layout.job!r}", "job")
        key = PartKey(part.header.group_id, part.header.attempt)
        delivery = self._deliveries[sequence] = _Delivery(sequence, message.reply, key)
        if key in self._open:
            self._counters["duplicates"] += 1
            await self._ack(delivery)
            return
        deliveries = self._parts.setdefault(key, [])
        deliveries.append(delivery)
        try:
            group = self._joiner.add(part)
        except MalformedMessage:
            deliveries.remove(delivery)
            raise
        if group is None:
            return
        del self._parts[key]
        received = self._open[key] = ReceivedGroup(group, self, deliveries)
        self._arrivals.put(received)

    async def _reject(self, message: Msg, error: MalformedMessage) -> None:
        await self._set_aside(message.data, error.reason, str(error))
        sequence = _stream_sequence(message.reply)
        await self._ack(self._deliveries.setdefault(sequence, _Delivery(sequence, message.reply)))

    def _on_evicted(self, key: PartKey, parts: list[GroupPart]) -> None:
        self._evicted.append((key, parts))

    async def settle(self, received: ReceivedGroup, *, acked: bool) -> None:
        """Ends a group's account, once."""
        key = PartKey(received.group.group_id, received.group.attempt)
        if self._open.get(key) is not received:
            return
        del self._open[key]
        self._room.set()
        for delivery in received._deliveries:
            if acked:
                await self._ack(delivery)
            else:
                self._deliveries.pop(delivery.sequence, None)
                await self._send(delivery.reply, b'-NAK {"delay": %d}' % _RETRY_LATER_NS, "")

    async def _ack(self, delivery: _Delivery) -> None:
        delivery.acked = True
        await self._send_ack(delivery)

    async def _send_ack(self, delivery: _Delivery) -> None:
        await self._send(delivery.reply, b"+ACK", f"{self._confirm_inbox}.{delivery.sequence}")

    async def _send(self, subject: str, payload: bytes, reply: str) -> None:
        if not subject or not self._connection.is_ready:
            return  # the message is gone, or the reader starts anew after the reconnect and sends again what is unconfirmed
        try:
            await self._connection.client.publish(subject, payload, reply=reply)
        except (nats.errors.Error, *RETRYABLE) as error:
            log.debug("not acknowledged now: %r", error)

    async def _on_confirmed(self, message: Msg) -> None:
        if not message.headers:  # otherwise a status: nobody listens on that consumer any more
            sequence = int(message.subject.rpartition(".")[2])
            self._deliveries.pop(sequence, None)
            self._confirmed[sequence] = None
            if len(self._confirmed) > _MAX_CONFIRMED:
                del self._confirmed[next(iter(self._confirmed))]
            self._settled.set()

    async def _wait_confirmed(self) -> None:
        try:
            async with asyncio.timeout(_CONFIRM_S):
                while any(delivery.acked for delivery in self._deliveries.values()):
                    self._settled.clear()
                    await self._settled.wait()
        except TimeoutError:
            log.warning("the last acknowledgements are not confirmed: their groups may come again at the next start")


def _stream_sequence(reply: str) -> int:
    """From "$JS.ACK.<stream>.<consumer>.<delivered>.<stream sequence>...", with two more tokens first on newer servers."""
    tokens = reply.split(".")
    return int(tokens[5] if len(tokens) == 9 else tokens[7])
