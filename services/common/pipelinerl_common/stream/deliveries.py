"""Account of the messages that the server has handed out: held, acknowledged, known to be gone."""

import asyncio
import logging
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from pipelinerl_common.stream.connection import RETRYABLE, Connection

log = logging.getLogger(__name__)

_MAX_REMEMBERED: Final = 1 << 16
_ASK_AGAIN_S: Final = 0.5
_PUT_BACK_NS: Final = 2_000_000_000


@dataclass(slots=True, eq=False)
class Delivery:
    """One message: its number on the stream and where to acknowledge it (empty: it went with the
    server's disk).
    """

    sequence: int
    reply: str


class Deliveries:
    """Each message is handed out once and acknowledged until that is certain, whatever happens to
    the server in between.

    Acknowledgements go out without waiting. The server handles them in order, so it is asked for a
    confirmation of one at a time, which covers all before it. A confirmed number is still
    remembered for a while: a server that is killed forgets its last removals and delivers those
    messages again.
    """

    def __init__(self, connection: Connection, counters: Counter[str]) -> None:
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
        """The consumer was made anew: what is acknowledged and unconfirmed is acknowledged again."""
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
        """The stream was made anew and counts from 1 again: no old number may be acknowledged."""
        lost = [*self._held.values(), *self._unconfirmed.values()]
        self._counters["lost"] += len(lost)
        for delivery in lost:
            delivery.reply = ""
        self._held.clear()
        self._unconfirmed.clear()
        self._confirmed.clear()
        self._asked.clear()

    async def accept(self, sequence: int, reply: str) -> Delivery | None:
        """The account of a new message; None for one that was handed out before, which needs
        nothing more.
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
        """The message is used: it is to leave the stream."""
        if self._let_go(delivery):
            await self._ack(delivery)

    async def put_back(self, delivery: Delivery) -> None:
        """The message is to be delivered again, some seconds from now."""
        if self._let_go(delivery):
            await self._send(delivery.reply, b'-NAK {"delay": %d}' % _PUT_BACK_NS, "")

    async def wait_confirmed(self, timeout_s: float) -> None:
        """Raises TimeoutError when acknowledgements are still unconfirmed after `timeout_s`."""
        async with asyncio.timeout(timeout_s):
            while self._unconfirmed:
                self._all_confirmed.clear()
                await self._send_ack(next(reversed(self._unconfirmed.values())))
                with suppress(TimeoutError):
                    async with asyncio.timeout(_ASK_AGAIN_S):
                        await self._all_confirmed.wait()

    def _let_go(self, delivery: Delivery) -> bool:
        """Whether the message was held. One that was lost is not, though a newer message may have
        its number.
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
        if self._asked and now - self._asked_at < _ASK_AGAIN_S:
            await self._send(delivery.reply, b"+ACK", "")
        else:
            self._asked, self._asked_at = set(self._unconfirmed), now
            await self._send(delivery.reply, b"+ACK", self._inbox)

    async def _send(self, subject: str, payload: bytes, reply: str) -> None:
        if not subject or not self._connection.is_ready:
            return  # it is gone, or `restart` makes up for it
        try:
            await self._connection.client.publish(subject, payload, reply=reply)
        except (nats.errors.Error, *RETRYABLE) as error:
            log.debug("not acknowledged now: %r", error)

    async def _on_confirmed(self, message: Msg) -> None:
        if message.headers or message.subject != self._inbox:
            return  # nobody listens there any more: a restart is near
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
