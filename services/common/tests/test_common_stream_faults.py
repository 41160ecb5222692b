"""The nats-server is killed, frozen, replaced by an empty one, or cuts connections, while services
use it.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from common_fakes import make_group

from pipelinerl.v1 import metrics_pb2
from pipelinerl_common.errors import Unavailable
from pipelinerl_common.settings import StreamSettings
from pipelinerl_common.stream import ANONYMOUS, NatsServer, ReceivedGroup, Stream, connect
from pipelinerl_common.stream.session import MAX_WAITING_BYTES, NatsSession, ServerErrors
from pipelinerl_common.types import GroupId

DEADLINE_S = 60.0


def open_stream(server: NatsServer, **settings: Any) -> AbstractAsyncContextManager[Stream]:
    return connect(server.url, "job", StreamSettings(**settings), name="test", timeout_s=DEADLINE_S)


async def take(groups: AsyncIterator[ReceivedGroup], number: int) -> list[ReceivedGroup]:
    async with asyncio.timeout(DEADLINE_S):
        return [await anext(groups) for _ in range(number)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


async def kill(server: NatsServer) -> None:
    os.kill(server.pid, signal.SIGKILL)
    async with asyncio.timeout(DEADLINE_S):
        await server.wait()


async def freeze(server: NatsServer) -> None:
    os.kill(server.pid, signal.SIGSTOP)
    await until(lambda: Path(f"/proc/{server.pid}/stat").read_text().split()[2] == "T")


async def test_nothing_is_lost_when_the_server_is_killed_again_and_again_while_groups_flow(
    tmp_path: Path,
) -> None:
    """Groups whose storage was confirmed arrive; neither side ends; what was acknowledged does
    not come back.
    """
    store, num_groups, num_kills = tmp_path / "nats", 400, 3
    progress = asyncio.Event()
    seen: list[str] = []

    async def publish(stream: Stream) -> None:
        slots = asyncio.Semaphore(16)

        async def publish_one(sequence: int) -> None:
            async with slots:
                await stream.publish_group(
                    make_group(sequence, segment_lengths=(200, 200)), timeout_s=DEADLINE_S
                )

        await asyncio.gather(*(publish_one(sequence) for sequence in range(num_groups)))

    async def consume(stream: Stream) -> None:
        async with stream.samples(max_pending=32) as groups:
            held: list[ReceivedGroup] = []
            while len(set(seen)) < num_groups:
                held += await take(groups, 1)
                seen.append(held[-1].group.group_id)
                progress.set()
                if len(held) == 8 or len(set(seen)) == num_groups:
                    for received in held:
                        await received.ack()
                    held.clear()

    first = NatsServer.start(store)
    server = await first.__aenter__()
    contexts = [first]
    async with open_stream(server) as publishing, open_stream(server) as consuming:
        flow = asyncio.gather(publish(publishing), consume(consuming))
        for round_ in range(num_kills):
            await until(lambda: len(seen) > (round_ + 1) * num_groups // (num_kills + 2))  # noqa: B023 - awaited at once
            await kill(server)
            contexts.append(NatsServer.start(store, port=server.port))
            server = await contexts[-1].__aenter__()
            await until(lambda: publishing.is_connected and consuming.is_connected)
        await asyncio.wait_for(flow, DEADLINE_S)
        assert set(seen) == {f"0-{sequence}" for sequence in range(num_groups)}
        assert len(seen) == num_groups
        assert (await consuming.depth()).num_messages == 0
        assert consuming.counters["reconnects"] == num_kills
        assert publishing.counters["reconnects"] == num_kills
    for context in contexts:
        await context.__aexit__(None, None, None)


async def test_acknowledgements_given_while_the_server_is_away_are_made_up_for(
    tmp_path: Path,
) -> None:
    async with NatsServer.start(tmp_path / "nats") as server, open_stream(server) as stream:
        for sequence in range(3):
            await stream.publish_group(make_group(sequence))
        async with stream.samples(max_pending=8) as groups:
            received = await take(groups, 3)
            await kill(server)
            await until(lambda: not stream.is_connected)
            await received[0].ack()
            await received[2].ack()
            async with NatsServer.start(tmp_path / "nats", port=server.port):
                await until(lambda: stream.counters["redelivered"] >= 1)
                await stream.publish_group(make_group(3))
                (new,) = await take(groups, 1)
                assert new.group.group_id == "0-3"  # what is held is not handed out a second time
                while (await stream.depth(DEADLINE_S)).num_messages != 2:  # noqa: ASYNC110 - the server has no event for it
                    await asyncio.sleep(0.01)
                await received[1].ack()
                await new.ack()
                while (await stream.depth(DEADLINE_S)).num_messages != 0:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)


async def test_publishing_to_a_server_that_stays_away_is_unavailable_at_the_deadline(
    tmp_path: Path,
) -> None:
    async with NatsServer.start(tmp_path / "nats") as server, open_stream(server) as stream:
        await kill(server)
        with pytest.raises(Unavailable, match="not done within 0"):
            await stream.publish_group(make_group(0), timeout_s=0.5)
        with pytest.raises(Unavailable):
            await (await stream.journal()).put("cursor", b"1", timeout_s=0.2)
        with pytest.raises(Unavailable):
            await (await stream.journal()).entries(timeout_s=0.2)


async def test_more_publishers_than_places_are_unavailable_at_the_deadline_too(
    tmp_path: Path,
) -> None:
    async with NatsServer.start(tmp_path / "nats") as server, open_stream(server) as stream:
        await kill(server)
        publishing = [
            stream.publish_group(make_group(sequence), timeout_s=0.5) for sequence in range(200)
        ]
        outcomes = await asyncio.wait_for(asyncio.gather(*publishing, return_exceptions=True), 10)
        assert all(isinstance(outcome, Unavailable) for outcome in outcomes)


async def test_metrics_are_dropped_and_counted_while_the_server_is_away(tmp_path: Path) -> None:
    async with NatsServer.start(tmp_path / "nats") as server, open_stream(server) as stream:
        await kill(server)
        await until(lambda: not stream.is_connected)
        for _ in range(3):
            assert not await stream.publish_metrics(metrics_pb2.MetricsRecord(step=1))
        assert stream.counters["metrics_dropped"] == 3


async def test_metrics_go_on_after_a_restart_without_a_repeat(tmp_path: Path) -> None:
    async with (
        NatsServer.start(tmp_path / "nats") as server,
        open_stream(server) as stream,
        stream.metrics() as records,
    ):
        await stream.publish_metrics(metrics_pb2.MetricsRecord(step=1))
        async with asyncio.timeout(DEADLINE_S):
            assert (await anext(records)).step == 1
        await kill(server)
        await until(lambda: not stream.is_connected)
        async with (
            NatsServer.start(tmp_path / "nats", port=server.port),
            asyncio.timeout(DEADLINE_S),
        ):
            await until(lambda: stream.is_connected)
            await stream.publish_metrics(metrics_pb2.MetricsRecord(step=2))
            assert (await anext(records)).step == 2


async def test_the_journal_survives_a_killed_server(tmp_path: Path) -> None:
    async with NatsServer.start(tmp_path / "nats") as server, open_stream(server) as stream:
        journal = await stream.journal()
        for number in range(50):
            await journal.put(f"0-{number}", b"x")
        await journal.delete("0-3")
        await kill(server)
        async with NatsServer.start(tmp_path / "nats", port=server.port):
            assert sorted(await journal.entries()) == sorted(
                f"0-{number}" for number in range(50) if number != 3
            )


async def test_a_server_that_lost_its_disk_gets_its_streams_again(tmp_path: Path) -> None:
    async with NatsServer.start(tmp_path / "one") as server, open_stream(server) as stream:
        async with stream.samples(max_pending=8) as groups:
            await stream.publish_group(make_group(0))
            (old,) = await take(groups, 1)
            await kill(server)
            async with NatsServer.start(tmp_path / "two", port=server.port):
                await stream.publish_group(make_group(1))
                (received,) = await take(groups, 1)
                assert received.group.group_id == "0-1"
                await (
                    old.ack()
                )  # of a message that is no more: must not remove the new one of the same number
                assert (await stream.depth()).num_messages == 1
                await received.ack()
                async with asyncio.timeout(DEADLINE_S):
                    while (await stream.depth()).num_messages:  # noqa: ASYNC110 - what is waited for has no event
                        await asyncio.sleep(0.01)
        assert stream.counters["lost"] == 1


async def test_a_server_that_cannot_write_is_unavailable_and_loses_nothing(tmp_path: Path) -> None:
    """A file-size limit stands for the full disk. The server serves what it has and takes more
    after a restart with space.
    """
    groups = [
        make_group(sequence, num_samples=8, segment_lengths=(400, 1600)) for sequence in range(40)
    ]  # 115 kB each
    limited = ("prlimit", "--fsize=2000000", "--core=0")
    stored: list[str] = []

    async def publish(stream: Stream, timeout_s: float) -> None:
        for group in groups[len(stored) :]:
            await stream.publish_group(group, timeout_s)
            stored.append(group.group_id)

    async with (
        NatsServer.start(tmp_path / "nats", launcher=limited) as server,
        open_stream(server) as stream,
    ):
        with pytest.raises(Unavailable, match="its disk may be full"):
            await publish(stream, timeout_s=0.5)
        assert 0 < len(stored) < len(groups)
        await kill(server)
        async with NatsServer.start(tmp_path / "nats", port=server.port):
            await publish(stream, timeout_s=DEADLINE_S)
            async with stream.samples(max_pending=64) as received:
                assert [each.group.group_id for each in await take(received, len(groups))] == stored


async def test_a_frozen_server_only_delays(tmp_path: Path) -> None:
    async with NatsServer.start(tmp_path / "nats") as server, open_stream(server) as stream:
        await freeze(server)
        try:
            publishing = asyncio.ensure_future(
                stream.publish_group(make_group(0), timeout_s=DEADLINE_S)
            )
            await until(lambda: stream.counters["retries"] >= 1)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        await publishing
        assert (await stream.depth()).num_messages == 1


async def test_a_frozen_server_holds_nobody_beyond_the_deadline_and_no_memory_beyond_the_bound(
    tmp_path: Path,
) -> None:
    large = make_group(0, num_samples=8, segment_lengths=(1000, 120_000))  # 7.7 MB
    async with NatsServer.start(tmp_path / "nats") as server, open_stream(server) as stream:
        await freeze(server)
        try:
            async with asyncio.timeout(DEADLINE_S):
                publishing = [
                    stream.publish_group(
                        replace(large, group_id=GroupId(f"0-{number}")), timeout_s=2
                    )
                    for number in range(20)
                ]
                outcomes = await asyncio.gather(*publishing, return_exceptions=True)
                await stream.publish_metrics(metrics_pb2.MetricsRecord())
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert all(isinstance(outcome, Unavailable) for outcome in outcomes)
        assert "outbound buffer limit exceeded" in str(outcomes[-1])
        assert stream._connection.client.pending_data_size < MAX_WAITING_BYTES + (8 << 20)
        await stream.publish_group(make_group(100), timeout_s=DEADLINE_S)


async def test_a_client_that_gave_up_is_replaced(tmp_path: Path) -> None:
    """The library closes its client for good after some errors of the protocol; here it is closed
    from outside.
    """
    async with NatsServer.start(tmp_path / "nats") as server, open_stream(server) as stream:
        async with stream.samples(max_pending=8) as groups:
            await stream.publish_group(make_group(0))
            (first,) = await take(groups, 1)
            await stream._connection.client.close()
            await stream.publish_group(make_group(1), timeout_s=DEADLINE_S)
            (second,) = await take(groups, 1)
            assert second.group.group_id == "0-1"
            await first.ack()
            await second.ack()
        assert (await stream.depth()).num_messages == 0


async def test_leaving_while_the_server_is_away_takes_no_longer_than_its_deadline(
    tmp_path: Path,
) -> None:
    async with (  # noqa: SIM117
        NatsServer.start(tmp_path / "nats") as server,
        asyncio.timeout(DEADLINE_S),
        open_stream(server) as stream,
    ):
        async with stream.samples(max_pending=8) as groups:
            await stream.publish_group(make_group(0))
            (received,) = await take(groups, 1)
            await kill(server)
            await until(lambda: not stream.is_connected)
            await received.ack()


async def test_a_session_that_is_stopped_while_it_subscribes_leaves_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stopped(*_: Any, **__: Any) -> None:
        raise asyncio.CancelledError

    async with NatsServer.start(tmp_path / "nats") as server:
        session = NatsSession(
            server.url,
            "test",
            ANONYMOUS,
            ServerErrors(),
            on_lost=lambda: None,
            on_back=lambda: None,
        )
        monkeypatch.setattr(session.client, "subscribe", stopped)
        with pytest.raises(asyncio.CancelledError):
            await session.connect(unless_refused=True)
        is_closed = session.client.is_closed
        await session.close()
    assert is_closed
