"""The journal: what a crash between any two writes leaves, slots that are used again, a store that
is unreachable.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pipelinerl_common.errors import FatalError, Unavailable
from pipelinerl_preprocessor.groups import Arrival
from pipelinerl_preprocessor.journal import JournalWriter
from pipelinerl_preprocessor.ledger import Ledger
from pipelinerl_staleness.areal import Areal, ArealSettings


class MemoryBucket:
    """A bucket that hangs after a number of writes, or is unreachable for the next few."""

    def __init__(self, entries: dict[str, bytes] | None = None, dies_after: int = 10**9) -> None:
        self.stored = dict(entries or {})
        self.num_writes = 0
        self.dies_after = dies_after
        self.num_refused = 0

    async def put(self, key: str, value: bytes) -> None:
        await self._write()
        self.stored[key] = value

    async def delete(self, key: str) -> None:
        await self._write()
        self.stored.pop(key, None)

    async def entries(self) -> dict[str, bytes]:
        return dict(self.stored)

    async def _write(self) -> None:
        if self.num_refused > 0:
            self.num_refused -= 1
            raise Unavailable("unreachable")
        if self.num_writes >= self.dies_after:
            await asyncio.Event().wait()
        self.num_writes += 1
        await asyncio.sleep(0)


def make_ledger() -> Ledger:
    return Ledger(Areal(ArealSettings(eta=1), 2), lease_s=10.0, max_attempts=3)


@asynccontextmanager
async def writing(bucket: MemoryBucket) -> AsyncIterator[tuple[Ledger, JournalWriter]]:
    ledger = make_ledger()
    journal = JournalWriter(bucket, ledger)
    await journal.recover(0.0)
    task = asyncio.create_task(journal.run())
    try:
        yield ledger, journal
    finally:
        task.cancel()
        await asyncio.wait([task])


async def a_short_run(ledger: Ledger, journal: JournalWriter) -> None:
    """Restore, two steps, a failure and a rewind, synchronised after each event."""
    ledger.restore("first", 0, None)
    ledger.publish(0)
    await journal.sync(0.2)
    ledger.grant("a", "s", 4, 0.0)
    await journal.sync(0.2)
    for group_id in ("0-0", "0-2"):
        ledger.arrive(group_id)
        ledger.ready(group_id, [0], [0])
    ledger.started("a", "0-1:0", 0)
    ledger.commit(0, ledger.take().groups, last=False)
    await journal.sync(0.2)
    snapshot = ledger.snapshot()
    ledger.drop("0-1")
    ledger.publish(1)
    ledger.grant("a", "s", 4, 0.0)
    await journal.sync(0.2)
    ledger.restore("second", 1, snapshot)
    ledger.publish(1)
    ledger.grant("a", "s", 4, 0.0)
    await journal.sync(0.2)


async def test_everything_is_there_after_a_clean_stop() -> None:
    bucket = MemoryBucket()
    async with writing(bucket) as (ledger, journal):
        await a_short_run(ledger, journal)
        expected = ledger.snapshot(), [group.lease_id for group in ledger.groups]
    async with writing(bucket) as (ledger, journal):
        assert (ledger.snapshot(), [group.lease_id for group in ledger.groups]) == expected
        assert ledger.state.restore_id == "second"
        await journal.sync()


async def total_writes() -> int:
    bucket = MemoryBucket()
    async with writing(bucket) as (ledger, journal):
        await a_short_run(ledger, journal)
    return bucket.num_writes


async def test_a_crash_between_any_two_writes_leaves_a_ledger_that_goes_on() -> None:
    for dies_after in range(await total_writes()):
        bucket = MemoryBucket(dies_after=dies_after)
        async with writing(bucket) as (ledger, journal):
            with pytest.raises(Unavailable):
                await a_short_run(ledger, journal)
        await check_goes_on(MemoryBucket(bucket.stored), dies_after)


async def check_goes_on(bucket: MemoryBucket, dies_after: int) -> None:
    async with writing(bucket) as (ledger, journal):
        if not ledger.restored:
            assert dies_after <= 1
            return
        snapshot = ledger.snapshot()
        trained = {0: [], 1: [0, 2]}[snapshot.num_committed_steps]
        unheard = (
            set(range(snapshot.next_prompt_index))
            - set(trained)
            - set(snapshot.open_prompt_indices)
        )
        assert unheard <= {1}, "only the prompt that failed may be gone"
        assert not set(trained) & set(snapshot.open_prompt_indices)
        assert (
            all(ledger.arrive(group_id) is not Arrival.ACCEPTED for group_id in ("0-0", "0-2"))
            or not trained
        )
        ledger.publish(snapshot.num_committed_steps)
        ledger.expire(100.0)
        leases = ledger.grant("b", "s", 9, 100.0)
        assert len({lease.prompt_index for lease in leases}) == len(leases) >= 2
        await journal.sync()
        assert len(bucket.stored) == 1 + len(ledger.groups)


async def test_the_bucket_holds_no_more_than_what_is_outstanding() -> None:
    bucket = MemoryBucket()
    async with writing(bucket) as (ledger, journal):
        ledger.restore("first", 0, None)
        ledger.publish(0)
        for step in range(50):
            for lease in ledger.grant("a", "s", 4, 0.0):
                ledger.arrive(lease.group_id)
                ledger.ready(lease.group_id, [step], [step])
            ledger.commit(step, ledger.take().groups, last=False)
            ledger.publish(step + 1)
            await journal.sync()
        assert len(bucket.stored) == 1 + len(ledger.groups) == 3
        assert max(int(key.removeprefix("group.")) for key in bucket.stored if key != "ledger") < 8


async def test_a_store_that_is_away_is_tried_again_and_sync_has_a_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipelinerl_preprocessor.journal._RETRY_S", 0.01)
    bucket = MemoryBucket()
    async with writing(bucket) as (ledger, journal):
        bucket.num_refused = 3
        ledger.restore("first", 0, None)
        await journal.sync()
        assert set(bucket.stored) == {"ledger"}
        bucket.dies_after = 0
        ledger.publish(0)
        with pytest.raises(Unavailable, match=r"within 0.05 s"):
            await journal.sync(0.05)


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ({"ledger": b"{"}, "'ledger'"),
        ({"ledger": b'{"schema_version":2}'}, "schema_version"),
        ({"ledger": b'{"schema_version":1,"strange":1,"last_commit":[]}'}, "strange"),
        ({"group.0": b"[]"}, r"'group\.0'"),
        ({"group.x": b"{}"}, "slot"),
    ],
)
async def test_a_journal_that_cannot_be_read_says_so(entries: dict[str, bytes], match: str) -> None:
    with pytest.raises(FatalError, match=match):
        await JournalWriter(MemoryBucket(entries), make_ledger()).recover(0.0)
