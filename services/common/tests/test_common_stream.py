"""The job's streams on a real nats-server: delivery, acknowledgement, parts, malformed messages,
limits, journal, metrics.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import nats
import pytest
from common_fakes import facts, make_group

from pipelinerl.v1 import metrics_pb2, sample_pb2
from pipelinerl_common.codec import encode_group
from pipelinerl_common.errors import FatalError, PermanentError, SettingsError, Unavailable
from pipelinerl_common.settings import StreamSettings
from pipelinerl_common.stream import Login, NatsServer, ReceivedGroup, Stream, connect

DEADLINE_S = 20.0


def open_stream(server: NatsServer, **settings: Any) -> AbstractAsyncContextManager[Stream]:
    return connect(server.url, "job", StreamSettings(**settings), name="test", timeout_s=DEADLINE_S)


@pytest.fixture
async def stream(server: NatsServer) -> AsyncIterator[Stream]:
    async with open_stream(server) as opened:
        yield opened


async def take(groups: AsyncIterator[ReceivedGroup], number: int) -> list[ReceivedGroup]:
    async with asyncio.timeout(DEADLINE_S):
        return [await anext(groups) for _ in range(number)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


def ids(received: Iterable[ReceivedGroup]) -> list[str]:
    return [each.group.group_id for each in received]


async def test_groups_arrive_whole_and_leave_the_stream_when_acknowledged(stream: Stream) -> None:
    sent = [make_group(sequence) for sequence in range(20)]
    await asyncio.gather(*(stream.publish_group(group) for group in sent))
    assert (await stream.depth()).num_messages == 20
    async with stream.samples(max_pending=20) as groups:
        received = await take(groups, 20)
        assert {each.group.group_id: facts(each.group) for each in received} == {
            each.group_id: facts(each) for each in sent
        }
        assert (await stream.depth()).num_messages == 20
        for each in received[:15]:
            await each.ack()
            await each.ack()
    assert (await stream.depth()).num_messages == 5


async def test_a_group_published_twice_arrives_once(stream: Stream) -> None:
    for group in (make_group(0), make_group(0), make_group(1)):
        await stream.publish_group(group)
    assert (await stream.depth()).num_messages == 2


async def test_what_a_reader_left_unacknowledged_comes_first_to_the_next(stream: Stream) -> None:
    for sequence in range(6):
        await stream.publish_group(make_group(sequence))
    async with stream.samples(max_pending=4) as groups:
        first = await take(groups, 4)
        await first[1].ack()
    async with stream.samples(max_pending=10) as groups:
        assert ids(await take(groups, 5)) == ["0-0", "0-2", "0-3", "0-4", "0-5"]


async def test_no_more_than_max_pending_are_out(stream: Stream) -> None:
    for sequence in range(5):
        await stream.publish_group(make_group(sequence))
    async with stream.samples(max_pending=2) as groups:
        received = await take(groups, 2)
        third = asyncio.ensure_future(anext(groups))
        await asyncio.wait([third], timeout=0.2)
        assert not third.done()
        await received[0].ack()
        async with asyncio.timeout(DEADLINE_S):
            assert (await third).group.group_id == "0-2"


async def test_waiting_for_a_group_may_be_cancelled(stream: Stream) -> None:
    async with stream.samples(max_pending=2) as groups:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(groups), 0.05)
        await stream.publish_group(make_group(0))
        assert ids(await take(groups, 1)) == ["0-0"]


async def test_a_group_put_back_comes_again(stream: Stream) -> None:
    await stream.publish_group(make_group(0))
    async with stream.samples(max_pending=2) as groups:
        (first,) = await take(groups, 1)
        await first.retry_later()
        (second,) = await take(groups, 1)
        assert facts(second.group) == facts(first.group)
        await first.ack()  # settled already: must not acknowledge the second delivery
        assert (await stream.depth()).num_messages == 1
        await second.ack()
    assert (await stream.depth()).num_messages == 0


async def test_a_group_over_the_payload_limit_is_split_and_joined(tmp_path: Path) -> None:
    async with (
        NatsServer.start(tmp_path / "nats", max_payload_bytes=16 << 10) as server,
        open_stream(server) as stream,
    ):
        large = make_group(0, num_samples=9, segment_lengths=(300, 400))  # 9 * 4.4 kB into 12 kB
        await stream.publish_group(large)
        await stream.publish_group(make_group(1))
        assert (await stream.depth()).num_messages == 6
        async with stream.samples(max_pending=1) as groups:
            (received,) = await take(groups, 1)
            assert facts(received.group) == facts(large)
            await received.ack()
            (received,) = await take(groups, 1)
            await received.ack()
        assert (await stream.depth()).num_messages == 0


async def test_interleaved_parts_of_many_groups_do_not_block_each_other(tmp_path: Path) -> None:
    async with (
        NatsServer.start(tmp_path / "nats", max_payload_bytes=16 << 10) as server,
        open_stream(server) as stream,
    ):
        sent = [
            make_group(sequence, num_samples=9, segment_lengths=(300, 400)) for sequence in range(8)
        ]
        parts = [encode_group(group, stream.max_payload_bytes) for group in sent]
        client = await nats.connect(server.url)
        for row in zip(*parts, strict=True):
            for part in row:
                await client.jetstream().publish("job.samples", part.payload)
        await client.close()
        async with stream.samples(max_pending=1) as groups:
            for _ in sent:
                (received,) = await take(groups, 1)
                await received.ack()
        assert (await stream.depth()).num_messages == 0


async def test_a_sample_over_the_payload_limit_is_a_permanent_error(tmp_path: Path) -> None:
    async with (
        NatsServer.start(tmp_path / "nats", max_payload_bytes=16 << 10) as server,
        open_stream(server) as stream,
    ):
        with pytest.raises(PermanentError, match="lower task"):
            await stream.publish_group(make_group(0, segment_lengths=(300, 4000)))


async def dead_letters(server: NatsServer, number: int) -> list[tuple[dict[str, str], bytes]]:
    client = await nats.connect(server.url)
    subscription = await client.jetstream().subscribe("job.dead")
    messages = [await subscription.next_msg(timeout=DEADLINE_S) for _ in range(number)]
    await client.close()
    return [
        ({str(key): value for key, value in message.headers.items()}, message.data)
        for message in messages
    ]


async def publish_raw(server: NatsServer, payload: bytes) -> None:
    client = await nats.connect(server.url)
    await client.jetstream().publish("job.samples", payload)
    await client.close()


async def test_malformed_messages_are_set_aside_counted_and_never_seen(
    server: NatsServer, stream: Stream
) -> None:
    unknown = sample_pb2.SampleGroup.FromString(encode_group(make_group(7), 1 << 20)[0].payload)
    unknown.schema_version = 2
    foreign = encode_group(make_group(8, job="other"), 1 << 20)[0].payload
    async with stream.samples(max_pending=4) as groups:
        for payload in (b"\xff\xff", unknown.SerializeToString(), foreign):
            await publish_raw(server, payload)
        await stream.publish_group(make_group(0))
        (received,) = await take(groups, 1)
        assert received.group.group_id == "0-0"
    assert {
        name: count for name, count in stream.counters.items() if name.startswith("set_aside")
    } == {
        "set_aside_unparsable": 1,
        "set_aside_schema_version": 1,
        "set_aside_job": 1,
    }
    assert (await stream.depth()).num_messages == 1
    letters = await dead_letters(server, 3)
    assert [headers["Reason"] for headers, _ in letters] == ["unparsable", "schema_version", "job"]
    assert [payload for _, payload in letters] == [
        b"\xff\xff",
        unknown.SerializeToString(),
        foreign,
    ]
    assert "this reader knows 1" in letters[1][0]["Detail"]


async def test_a_malformed_message_as_large_as_the_server_takes_is_set_aside_truncated(
    tmp_path: Path,
) -> None:
    async with (
        NatsServer.start(tmp_path / "nats", max_payload_bytes=16 << 10) as server,
        open_stream(server) as stream,
    ):
        await publish_raw(server, bytes(16 << 10))
        async with stream.samples(max_pending=4) as groups:
            await stream.publish_group(make_group(0))
            await take(groups, 1)
        ((headers, payload),) = await dead_letters(server, 1)
        assert headers["Truncated-From"] == str(16 << 10)
        assert len(payload) == stream.max_payload_bytes


async def test_parts_whose_group_was_granted_again_are_set_aside(
    server: NatsServer, stream: Stream
) -> None:
    group = make_group(0, num_samples=3, segment_lengths=(300, 400))
    one_sample = len(encode_group(replace(group, samples=group.samples[:1]), 1 << 20)[0].payload)
    orphan = encode_group(group, 2 * one_sample + 16)[0]
    again = encode_group(replace(group, attempt=2), 2 * one_sample + 16)
    async with stream.samples(max_pending=4) as groups:
        for part in (orphan, *again):
            await publish_raw(server, part.payload)
        (received,) = await take(groups, 1)
        assert received.group.attempt == 2
        await received.ack()
    assert stream.counters["set_aside_incomplete"] == 1
    assert (await stream.depth()).num_messages == 0
    ((headers, _),) = await dead_letters(server, 1)
    assert headers["Detail"] == "1 of 2 parts of attempt 1 arrived"


async def test_parts_that_make_no_group_are_all_set_aside(
    server: NatsServer, stream: Stream
) -> None:
    group = make_group(0, num_samples=3, segment_lengths=(300, 400))
    one_sample = len(encode_group(replace(group, samples=group.samples[:1]), 1 << 20)[0].payload)
    first, second = encode_group(group, 2 * one_sample + 16)
    twice = sample_pb2.SampleGroup.FromString(second.payload)
    twice.samples[0].index = 0
    async with stream.samples(max_pending=4) as groups:
        for payload in (first.payload, twice.SerializeToString()):
            await publish_raw(server, payload)
        await stream.publish_group(make_group(1))
        (received,) = await take(groups, 1)
        assert received.group.group_id == "0-1"
        await received.ack()
    assert (await stream.depth()).num_messages == 0
    letters = await dead_letters(server, 2)
    assert [headers["Reason"] for headers, _ in letters] == ["sample_index", "incomplete"]
    assert letters[0][1] == twice.SerializeToString()


async def test_a_reader_can_set_a_group_aside(server: NatsServer, stream: Stream) -> None:
    await stream.publish_group(make_group(0))
    async with stream.samples(max_pending=4) as groups:
        (received,) = await take(groups, 1)
        await stream.set_aside(received, "nan_reward", "sample 3: reward=nan \u2013 not a number")
    assert stream.counters["set_aside_nan_reward"] == 1
    assert (await stream.depth()).num_messages == 0
    ((headers, payload),) = await dead_letters(server, 1)
    assert headers == {"Reason": "nan_reward", "Detail": "sample 3: reward=nan ? not a number"}
    assert payload == encode_group(make_group(0), 1 << 20)[0].payload


async def test_publishing_waits_while_the_stream_is_full(server: NatsServer) -> None:
    async with open_stream(server, max_bytes=1 << 20) as stream:
        groups = [
            make_group(sequence, num_samples=8, segment_lengths=(400, 1600))
            for sequence in range(12)
        ]  # 115 kB each
        published = [
            asyncio.ensure_future(stream.publish_group(group, timeout_s=60)) for group in groups
        ]
        await until(
            lambda: sum(task.done() for task in published) >= 8 and stream.counters["retries"] > 0
        )
        assert not all(task.done() for task in published)
        async with stream.samples(max_pending=2) as received_groups:
            seen = set()
            for _ in groups:
                (received,) = await take(received_groups, 1)
                seen.add(received.group.group_id)
                await received.ack()
        assert seen == {group.group_id for group in groups}
        await asyncio.gather(*published)


async def test_a_full_stream_is_unavailable_at_the_deadline(server: NatsServer) -> None:
    async with open_stream(server, max_bytes=1 << 20) as stream:
        groups = [
            make_group(sequence, num_samples=8, segment_lengths=(400, 1600))
            for sequence in range(12)
        ]
        with pytest.raises(Unavailable, match="maximum bytes exceeded"):
            await asyncio.gather(*(stream.publish_group(group, timeout_s=0.5) for group in groups))


async def test_settings_of_an_existing_stream_are_updated(server: NatsServer) -> None:
    async with open_stream(server, max_bytes=1 << 20):
        pass
    async with open_stream(server, max_bytes=2 << 20) as stream:
        await stream.publish_group(make_group(0))
    client = await nats.connect(server.url)
    info = await client.jetstream().stream_info("job_samples")
    await client.close()
    assert info.config.max_bytes == 2 << 20
    assert info.state.messages == 1


async def test_a_stream_that_fills_the_servers_store_can_be_connected_to_by_many(
    server: NatsServer, tmp_path: Path
) -> None:
    settings = StreamSettings(
        max_bytes=int(0.75 * 0.6 * shutil.disk_usage(tmp_path).free)
    )  # the server takes 75 %
    async with (
        connect(server.url, "large", settings, name="up") as first,
        connect(server.url, "large", settings, name="preprocessor", timeout_s=DEADLINE_S) as second,
    ):
        assert (await first.depth(5.0)).num_messages == (await second.depth(5.0)).num_messages == 0


async def test_replicas_that_the_server_cannot_keep_are_named(server: NatsServer) -> None:
    with pytest.raises(SettingsError, match=r"stream\.replicas=3: .*set it to 1"):
        async with open_stream(server, replicas=3):
            pass


async def test_more_bytes_than_the_server_has_are_named(server: NatsServer) -> None:
    with pytest.raises(SettingsError, match=r"stream\.maxBytes=1000000000000000: .*lower it"):
        async with open_stream(server, max_bytes=10**15):
            pass


async def test_a_job_name_that_is_no_stream_name_is_named(server: NatsServer) -> None:
    with pytest.raises(SettingsError, match=r"metadata\.name='a\.b'"):
        async with connect(server.url, "a.b", StreamSettings(), name="test"):
            pass


async def test_without_a_server_connecting_is_unavailable_at_the_deadline(
    server: NatsServer,
) -> None:
    port_nobody_listens_on = 1
    with pytest.raises(Unavailable, match=r"no nats-server at nats://127.0.0.1:1 within 0.3 s"):
        async with connect(
            f"nats://127.0.0.1:{port_nobody_listens_on}",
            "job",
            StreamSettings(),
            name="test",
            timeout_s=0.3,
        ):
            pass


@pytest.mark.parametrize("token", [None, "wrong"])
async def test_a_wrong_token_is_refused_at_once(tmp_path: Path, token: str | None) -> None:
    async with NatsServer.start(tmp_path / "nats", token="secret") as server:
        async with connect(
            server.url, "job", StreamSettings(), name="test", login=Login(token="secret")
        ) as stream:
            await stream.publish_group(make_group(0))
        with pytest.raises(SettingsError, match="refuses the token"):
            async with connect(
                server.url,
                "job",
                StreamSettings(),
                name="test",
                login=Login(token=token),
                timeout_s=DEADLINE_S,
            ):
                pass


async def test_a_second_reader_ends_the_first(server: NatsServer, stream: Stream) -> None:
    async with stream.samples(max_pending=4) as groups:
        await stream.publish_group(make_group(0))
        await take(groups, 1)
        async with open_stream(server) as other, other.samples(max_pending=4) as other_groups:
            assert ids(await take(other_groups, 1)) == ["0-0"]
            with pytest.raises(FatalError, match="another process has taken over"):
                await take(groups, 1)


async def test_the_journal_keeps_the_last_value_of_every_key(
    server: NatsServer, stream: Stream
) -> None:
    journal = await stream.journal()
    assert await journal.entries() == {}
    for number in range(600):
        await journal.put(f"groups/0-{number % 300}", str(number).encode())
    await journal.put("cursor", b"")
    await journal.delete("groups/0-7")
    await journal.delete("never-there")
    expected = {
        f"groups/0-{number}": str(number + 300).encode() for number in range(300) if number != 7
    } | {"cursor": b""}
    assert await journal.entries() == expected
    async with open_stream(server) as other:
        assert await (await other.journal()).entries() == expected


async def test_the_journal_does_not_grow_with_its_history(
    server: NatsServer, stream: Stream
) -> None:
    journal = await stream.journal()
    for number in range(50):
        await journal.put(f"0-{number}", b"x" * 100)
        await journal.delete(f"0-{number}")
    client = await nats.connect(server.url)
    info = await client.jetstream().stream_info("KV_job_journal")
    await client.close()
    assert info.state.messages == 0


@pytest.mark.parametrize("key", ["", "a b", "a.*", ">", "é", ".a", "a.", "a..b"])
async def test_impossible_journal_keys_are_refused(stream: Stream, key: str) -> None:
    with pytest.raises(ValueError, match="journal key"):
        await (await stream.journal()).put(key, b"")


async def test_metrics_come_from_the_beginning_and_then_live(stream: Stream) -> None:
    def record(step: int) -> metrics_pb2.MetricsRecord:
        return metrics_pb2.MetricsRecord(
            schema_version=1, job="job", role="trainer", step=step, values={"lag_mean": 0.5}
        )

    for step in range(3):
        await stream.publish_metrics(record(step))
    async with stream.metrics() as records, asyncio.timeout(DEADLINE_S):
        assert [(await anext(records)).step for _ in range(3)] == [0, 1, 2]
        await stream.publish_metrics(record(3))
        assert await anext(records) == record(3)


async def test_jobs_on_one_server_do_not_see_each_other(server: NatsServer, stream: Stream) -> None:
    async with connect(server.url, "other", StreamSettings(), name="test") as other:
        await other.publish_group(make_group(0, job="other"))
        await stream.publish_group(make_group(1))
        assert (await other.depth()).num_messages == 1
        async with stream.samples(max_pending=4) as groups:
            assert ids(await take(groups, 1)) == ["0-1"]
