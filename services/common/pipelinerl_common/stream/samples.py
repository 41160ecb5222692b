"""The reading side of the sample stream: joins parts into groups, sets aside what is broken, and
accounts for every message that the server has delivered.

message -- accept --> held -- ack ------> unconfirmed -- server confirms --> confirmed
                           -- put_back -> delivered again some seconds later
"""

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
from pipelinerl_common.errors import MalformedMessage, Unavailable
from pipelinerl_common.stream.connection import StreamConnection
from pipelinerl_common.stream.layout import CONSUMER, StreamLayout
from pipelinerl_common.stream.pull import Arrivals, PullReader
from pipelinerl_common.stream.session import RETRYABLE
from pipelinerl_common.tracing import TRACEPARENT
from pipelinerl_common.types import SampleGroup

log = logging.getLogger(__name__)

SetAside = Callable[[bytes, str, str], Awaitable[None]]
"""Called with a payload, the reason in a word, and the detail."""

_CONFIRM_S: Final = 5.0
_MAX_REMEMBERED: Final = 1 << 16
_ASK_AGAIN_S: Final = 0.5
_PUT_BACK_NS: Final = 2_000_000_000


@dataclass(slots=True, eq=False)
class Delivery:
    """One message: its number on the stream and the subject that acknowledges it (empty: the
    message was lost with the server's disk).
    """

    sequence: int
    reply: str


class Deliveries:
    """The account of delivered messages: each is handed out once and acknowledged until that is
    certain, whatever happens to the server in between.

    Acknowledgements go out without waiting. The server handles them in order, so it is asked for a
    confirmation of one at a time, which covers all before it. A confirmed number is still
    remembered for a while: a server that is killed forgets its last removals and delivers those
    messages again.
    """

    def __init__(self, connection: StreamConnection, counters: Counter[str]) -> None:
        self._connection = connection
        self._counters = counters
        self._held: dict[int, Delivery] = {}
        self._unconfirmed: dict[int, Delivery] = {}
        self._confirmed: dict[int, None] = {}
        self._asked: set[int] = set()
        self._asked_at = 0.0
        self._inbox = ""
        self._subscription: Subscription | None = None
        self._all_confirmed = asyncio.Event()

    async def restart(self) -> None:
        """Acknowledges again what is unconfirmed, after the consumer was created again."""
        client, older = self._connection.client, self._subscription
        self._inbox = client.new_inbox()
        self._subscription = await client.subscribe(self._inbox, cb=self._on_confirmed)
        if older is not None:
            with suppress(nats.errors.Error):  # its client may be gone
                await older.unsubscribe()
        self._asked.clear()
        for delivery in tuple(self._unconfirmed.values()):
            await self._send_ack(delivery)

    def forget_all(self) -> None:
        """Drops the account of a stream that was lost. The new one counts from 1 again, so no old
        number may be acknowledged.
        """
        lost = [*self._held.values(), *self._unconfirmed.values()]
        self._counters["lost"] += len(lost)
        for delivery in lost:
            delivery.reply = ""
        self._held.clear()
        self._unconfirmed.clear()
        self._confirmed.clear()
        self._asked.clear()

    async def accept(self, sequence: int, reply: str) -> Delivery | None:
        """The account of a new message; None for one that was handed out before, which the caller
        ignores.
        """
        if sequence in self._held:
            self._held[sequence].reply = reply
        elif sequence in self._unconfirmed or sequence in self._confirmed:
            self._confirmed.pop(sequence, None)
            self._unconfirmed.pop(sequence, None)
            self._asked.discard(sequence)
            await self._ack(Delivery(sequence, reply))
        else:
            delivery = self._held[sequence] = Delivery(sequence, reply)
            return delivery
        self._counters["redelivered"] += 1
        return None

    async def ack(self, delivery: Delivery) -> None:
        """Removes a used message from the stream."""
        if self._release(delivery):
            await self._ack(delivery)

    async def put_back(self, delivery: Delivery) -> None:
        """Has the message delivered again, some seconds from now."""
        if self._release(delivery):
            await self._send(delivery.reply, b'-NAK {"delay": %d}' % _PUT_BACK_NS, "")

    async def wait_confirmed(self, timeout_s: float) -> None:
        """Raises TimeoutError when acknowledgements are still unconfirmed after `timeout_s`."""
        async with asyncio.timeout(timeout_s):
            while self._unconfirmed:
                await self._ask_once()

    async def _ask_once(self) -> None:
        self._all_confirmed.clear()
        await self._send_ack(next(reversed(self._unconfirmed.values())))
        # The request or its answer is lost with a connection, so it is repeated.
        with suppress(TimeoutError):
            async with asyncio.timeout(_ASK_AGAIN_S):
                await self._all_confirmed.wait()

    def _release(self, delivery: Delivery) -> bool:
        """Whether the message was held. A lost one is not, though a newer message may have its
        number.
        """
        if self._held.get(delivery.sequence) is not delivery:
            return False
        del self._held[delivery.sequence]
        return True

    async def _ack(self, delivery: Delivery) -> None:
        self._unconfirmed[delivery.sequence] = delivery
        await self._send_ack(delivery)

    async def _send_ack(self, delivery: Delivery) -> None:
        now = asyncio.get_running_loop().time()
        # At most one request for confirmation is in flight; the others are sent and not awaited.
        if self._asked and now - self._asked_at < _ASK_AGAIN_S:
            await self._send(delivery.reply, b"+ACK", "")
        else:
            self._asked, self._asked_at = set(self._unconfirmed), now
            await self._send(delivery.reply, b"+ACK", self._inbox)

    async def _send(self, subject: str, payload: bytes, reply: str) -> None:
        if not subject or not self._connection.is_ready:
            return  # the message is lost, or `restart` acknowledges it again
        try:
            await self._connection.client.publish(subject, payload, reply=reply)
        except (nats.errors.Error, *RETRYABLE) as error:
            log.debug("not acknowledged now: %r", error)

    async def _on_confirmed(self, message: Msg) -> None:
        if message.headers or message.subject != self._inbox:
            return  # "no responders", or an older inbox: `restart` follows
        # The server handles acknowledgements in order, so this one confirms all sent before it.
        for sequence in self._asked:
            if self._unconfirmed.pop(sequence, None) is not None:
                self._confirmed[sequence] = None
        self._asked.clear()
        while len(self._confirmed) > _MAX_REMEMBERED:
            del self._confirmed[next(iter(self._confirmed))]
        if self._unconfirmed:
            await self._send_ack(next(reversed(self._unconfirmed.values())))
        else:
            self._all_confirmed.set()


@dataclass(slots=True, eq=False)
class ReceivedGroup:
    """A group from the stream. Its reader calls one of `ack`, `retry_later` or `Stream.set_aside`;
    a second call does nothing.
    """

    group: SampleGroup
    _reader: "SampleReader" = field(repr=False)
    _deliveries: list[Delivery] = field(repr=False)
    traceparent: str = ""
    """Trace context of the group's publication; empty when it is not traced."""

    @property
    def num_messages(self) -> int:
        """Number of messages that carried the group."""
        return len(self._deliveries)

    async def ack(self) -> None:
        """Removes all parts of the used group from the stream. Returns without waiting; the
        acknowledgement is sent again after a reconnect until the server confirms it. Only a crash
        before that can bring the group back, at the next start.
        """
        await self._reader.settle(self, put_back=False)

    async def retry_later(self) -> None:
        """Puts the group back, to be delivered again after some seconds."""
        await self._reader.settle(self, put_back=True)


class SampleReader:
    """Delivers whole groups, at most `max_pending` unsettled at a time."""

    def __init__(
        self,
        connection: StreamConnection,
        layout: StreamLayout,
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
        """Yields groups as they arrive; those that an earlier reader left unacknowledged come
        first.
        """
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
                        "the last acknowledgements are unconfirmed: their groups may be delivered "
                        "again at the next start"
                    )

    async def settle(self, received: ReceivedGroup, *, put_back: bool) -> None:
        """Acknowledges a group or puts it back, the first time only."""
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
        """Creates the consumer again, so that it starts from the oldest unacknowledged message."""
        jetstream, stream = self._connection.jetstream, self._layout.stream("samples")
        # An existing consumer still counts as delivered what was lost with its reader or with the
        # connection, and would deliver it again only after days (see `sample_consumer`).
        with suppress(nats.js.errors.NotFoundError):
            await jetstream.delete_consumer(stream, CONSUMER)
        created = str((await jetstream.stream_info(stream)).created)
        if self._stream_created not in ("", created):
            log.error("the sample stream was created again: the groups on it are lost")
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
            detail = f"{len(parts)} of {parts[0].num_parts} parts of attempt {key.attempt} arrived"
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
