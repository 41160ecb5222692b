"""Publishing to JetStream with many acknowledgements outstanding, at little cost per message."""

import asyncio
import json
from itertools import count
from typing import Final

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

MAX_WAITING_BYTES: Final = 64 << 20
"""Of what was published and has not gone out, since the server does not read: nothing more is
published beyond it.
"""


def check_room(client: Client) -> None:
    """Raises OutboundBufferLimitError where the client would otherwise keep more and more, or wait
    without a deadline.
    """
    if client.pending_data_size > MAX_WAITING_BYTES:
        raise nats.errors.OutboundBufferLimitError


class AckedPublisher:
    """One subscription takes all acknowledgements of a client. What is outstanding fails at once
    when the connection is lost, instead of by its timeout.
    """

    def __init__(self) -> None:
        self._client: Client | None = None
        self._inbox = ""
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def attach(self, client: Client) -> None:
        """Publishes through `client` from now on."""
        self._inbox = client.new_inbox()
        await client.subscribe(
            self._inbox + ".*", cb=self._on_ack, pending_msgs_limit=0, pending_bytes_limit=0
        )
        self._client = client

    async def publish(
        self, subject: str, payload: bytes, headers: dict[str, str] | None, timeout_s: float
    ) -> None:
        """Returns when the server has stored the message. Raises the NATS client's errors,
        TimeoutError among them.
        """
        assert self._client is not None, "attach comes first"
        check_room(self._client)
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        acknowledged = self._waiting[number] = loop.create_future()
        timer = loop.call_later(timeout_s, self._fail, number, nats.errors.TimeoutError())
        try:
            await self._client.publish(
                subject, payload, reply=f"{self._inbox}.{number}", headers=headers
            )
            await acknowledged
        finally:
            timer.cancel()
            del self._waiting[number]

    def fail_all(self) -> None:
        """The connection is lost: nobody will answer."""
        for number in self._waiting:
            self._fail(number, nats.errors.ConnectionClosedError())

    def _fail(self, number: int, error: Exception) -> None:
        future = self._waiting[number]
        if not future.done():
            future.set_exception(error)
            # counts as seen: the publisher may have been cancelled before it waits for it
            future.exception()

    async def _on_ack(self, message: Msg) -> None:
        future = self._waiting.get(int(message.subject.rpartition(".")[2]))
        if future is None or future.done():
            return
        if message.headers:  # "no responders": JetStream is not up yet or the stream is missing
            future.set_exception(nats.js.errors.NoStreamResponseError())
        elif b'"error"' in message.data:
            try:
                nats.js.errors.APIError.from_error(
                    json.loads(message.data)["error"]
                )  # raises the error's own class
            except nats.js.errors.APIError as error:
                future.set_exception(error)
        else:
            future.set_result(None)
