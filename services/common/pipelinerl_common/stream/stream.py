"""A service's end of its job's streams: groups, metrics, dead letters and the journal."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Final

import nats.errors
from google.protobuf.message import DecodeError
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from pipelinerl.v1 import metrics_pb2
from pipelinerl_common import tracing
from pipelinerl_common.codec import EncodedPart, encode_group
from pipelinerl_common.errors import Unavailable
from pipelinerl_common.service import cancel_all
from pipelinerl_common.settings import StreamSettings
from pipelinerl_common.stream.connection import StreamConnection
from pipelinerl_common.stream.layout import HEADER_RESERVE_BYTES, StreamLayout
from pipelinerl_common.stream.login import ANONYMOUS, Login
from pipelinerl_common.stream.pull import Arrivals, PullReader
from pipelinerl_common.stream.samples import ReceivedGroup, SampleReader
from pipelinerl_common.stream.session import RETRYABLE, check_room
from pipelinerl_common.types import SampleGroup

log = logging.getLogger(__name__)

_MAX_PUBLISHING_MESSAGES: Final = 64
_SET_ASIDE_S: Final = 30.0
_METRICS_WAITING: Final = 4096
_DETAIL_CHARACTERS: Final = 500
_ONCE_THROUGH: Final = ConsumerConfig(
    ack_policy=AckPolicy.NONE, inactive_threshold=60.0, mem_storage=True
)


@asynccontextmanager
async def connect(
    url: str,
    job: str,
    settings: StreamSettings,
    *,
    name: str,
    namespace: str | None = None,
    login: Login = ANONYMOUS,
    timeout_s: float = 60.0,
) -> AsyncIterator["Stream"]:
    """Opens the streams of `job` on the server at `url`, created or updated to `settings`. `name`
    shows in the server's reports; `namespace` is that of the job's metadata and keeps jobs of one
    name apart.

    Inside the block the connection is restored whatever happens to the server, and calls wait up to
    their own deadlines. Raises Unavailable without a server within `timeout_s` or when it refuses
    credentials, which may pass; SettingsError for a wrong token or limits that the server cannot
    provide.
    """
    layout = StreamLayout(job, settings, namespace)
    counters: Counter[str] = Counter()

    async def prepare(connection: StreamConnection) -> None:
        await layout.ensure(connection.jetstream)

    opening = StreamConnection.open(
        url, name=name, login=login, prepare=prepare, timeout_s=timeout_s, counters=counters
    )
    async with opening as connection:
        yield Stream(connection, layout, counters)


@dataclass(frozen=True, slots=True)
class StreamDepth:
    """The content of the sample stream: everything that is not acknowledged yet."""

    num_messages: int
    num_bytes: int
    max_bytes: int
    """Size at which publishing waits."""


class Stream:
    """One service's end of its job's streams.

    `counters` only grow: set_aside_<reason>, retries (publishes and requests sent again),
    redelivered, duplicates (groups published twice), lost (unacknowledged when the server returned
    without its disk), reconnects, metrics_dropped, metrics_malformed.
    """

    def __init__(
        self, connection: StreamConnection, layout: StreamLayout, counters: Counter[str]
    ) -> None:
        self._connection = connection
        self._layout = layout
        self.counters = counters
        self._publishing = asyncio.Semaphore(_MAX_PUBLISHING_MESSAGES)

    @property
    def max_payload_bytes(self) -> int:
        """Largest payload of one message, without headers."""
        return int(self._connection.client.max_payload) - HEADER_RESERVE_BYTES

    @property
    def is_connected(self) -> bool:
        """Whether the server is there now; for display."""
        return self._connection.is_ready

    async def publish_group(self, group: SampleGroup, timeout_s: float = 60.0) -> None:
        """Returns when the server has stored every part. Many groups may be published concurrently.

        Waits while the server is unreachable or the stream is full. Raises Unavailable at the
        deadline (parts may be stored: publishing the same group again is safe), PermanentError for
        a sample larger than the server takes.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        parts = encode_group(group, self.max_payload_bytes)
        if len(parts) == 1:
            await self._publish_part(parts[0], deadline)
        else:
            await asyncio.gather(*(self._publish_part(part, deadline) for part in parts))

    async def _publish_part(self, part: EncodedPart, deadline: float) -> None:
        # The bound keeps a long outage from filling the client's buffer with copies of retries.
        if self._publishing.locked():
            try:
                async with asyncio.timeout_at(deadline):
                    await self._publishing.acquire()
            except TimeoutError as error:
                raise Unavailable(
                    f"{part.message_id}: earlier publishes wait for the stream's server"
                ) from error
        else:
            await self._publishing.acquire()
        try:
            left_s = deadline - asyncio.get_running_loop().time()
            headers = {"Nats-Msg-Id": part.message_id, **tracing.headers()}
            await self._connection.publish(
                self._layout.subject("samples"), part.payload, headers, left_s
            )
        finally:
            self._publishing.release()

    def samples(
        self, max_pending: int
    ) -> AbstractAsyncContextManager[AsyncIterator[ReceivedGroup]]:
        """Iterates over groups as they arrive, first those that an earlier reader has left
        unacknowledged.

        At most `max_pending` are handed out and neither acknowledged nor put back. Malformed
        messages never appear here: they are set aside and counted. The iteration raises FatalError
        when another process starts to read the same job's samples.
        """
        if max_pending < 1:
            raise ValueError(f"max_pending={max_pending} must be at least 1")
        return SampleReader(
            self._connection, self._layout, max_pending, self._set_aside, self.counters
        ).reading()

    async def set_aside(self, received: ReceivedGroup, reason: str, detail: str = "") -> None:
        """Moves a group to the dead-letter subject. `reason` is one word for counters. Raises
        Unavailable.
        """
        for part in encode_group(received.group, self.max_payload_bytes):
            await self._set_aside(part.payload, reason, detail)
        await received.ack()

    async def _set_aside(self, payload: bytes, reason: str, detail: str) -> None:
        detail = detail[:_DETAIL_CHARACTERS]
        log.warning("set aside: reason=%s %s", reason, detail)
        headers = {"Reason": reason, "Detail": detail.encode("ascii", "replace").decode()}
        if len(payload) > self.max_payload_bytes:
            headers["Truncated-From"] = str(len(payload))
            payload = payload[: self.max_payload_bytes]
        await self._connection.publish(self._layout.subject("dead"), payload, headers, _SET_ASIDE_S)
        self.counters[f"set_aside_{reason}"] += 1

    async def depth(self, timeout_s: float = 10.0) -> StreamDepth:
        """Asks the server how much the sample stream holds. Raises Unavailable."""
        answer = await self._connection.request(
            f"$JS.API.STREAM.INFO.{self._layout.stream('samples')}", {}, timeout_s
        )
        state, config = answer["state"], answer["config"]
        return StreamDepth(
            int(state["messages"]), int(state["bytes"]), int(config.get("max_bytes", 0))
        )

    async def journal(self) -> "Journal":
        """The job's journal, which must have one writer only."""
        return Journal(self._connection, self._layout)

    async def publish_metrics(self, record: metrics_pb2.MetricsRecord) -> bool:
        """Sends a record with best effort: never raises, never waits for the server. Returns
        whether it was sent; otherwise it counts as metrics_dropped.
        """
        try:
            if not self._connection.is_ready:
                raise Unavailable("no connection")
            check_room(self._connection.client)
            await self._connection.client.publish(
                self._layout.subject("metrics"), record.SerializeToString()
            )
        except (Unavailable, nats.errors.Error, *RETRYABLE) as error:
            self.counters["metrics_dropped"] += 1
            log.debug("metrics dropped: %r", error)
            return False
        return True

    @asynccontextmanager
    async def metrics(self) -> AsyncIterator[AsyncIterator[metrics_pb2.MetricsRecord]]:
        """Iterates over all records that the stream still has, in order, then over new ones as they
        arrive.
        """
        arrivals: Arrivals[metrics_pb2.MetricsRecord] = Arrivals()
        stream = self._layout.stream("metrics")
        next_sequence = 1

        async def make_consumer() -> str:
            config = ConsumerConfig(
                ack_policy=AckPolicy.NONE,
                deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
                opt_start_seq=next_sequence,
                inactive_threshold=60.0,
                mem_storage=True,
            )
            return str((await self._connection.jetstream.add_consumer(stream, config)).name)

        async def capacity() -> int:
            return await arrivals.wait_room(_METRICS_WAITING)

        async def handle(messages: list[Msg]) -> None:
            nonlocal next_sequence
            for message in messages:
                next_sequence = message.metadata.sequence.stream + 1
                try:
                    arrivals.put(metrics_pb2.MetricsRecord.FromString(message.data))
                except DecodeError:
                    self.counters["metrics_malformed"] += 1

        reader = PullReader(
            self._connection, stream, make_consumer=make_consumer, capacity=capacity, handle=handle
        )
        async with arrivals.filled_by(reader.run()) as records:
            yield records


class Journal:
    """A small durable map from keys to bytes with one writer, which stores the ledger: a JetStream
    key-value bucket. Every method waits for the server, up to its `timeout_s`, then raises
    Unavailable.
    """

    def __init__(self, connection: StreamConnection, layout: StreamLayout) -> None:
        self._connection = connection
        self._layout = layout

    async def put(self, key: str, value: bytes, timeout_s: float = 60.0) -> None:
        """Sets `key`; the value is durable when this returns. Raises ValueError for a key with
        other characters than letters, digits and - / _ = .
        """
        await self._connection.publish(self._layout.journal_subject(key), value, None, timeout_s)

    async def delete(self, key: str, timeout_s: float = 60.0) -> None:
        """Removes `key` without a marker, so that the bucket does not grow with its history."""
        subject = self._layout.journal_subject(key)
        await self._connection.request(
            f"$JS.API.STREAM.PURGE.{self._layout.journal_stream}", {"filter": subject}, timeout_s
        )

    async def entries(self, timeout_s: float = 60.0) -> dict[str, bytes]:
        """Reads the whole bucket."""
        entries: dict[str, bytes] = {}
        complete = asyncio.Event()
        num_missing = 0

        async def make_consumer() -> str:
            nonlocal num_missing
            entries.clear()  # a reconnect reads from the start
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
