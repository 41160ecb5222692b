"""Batches of a streaming policy: rows go out while groups are still awaited."""

from pathlib import Path
from typing import Any

import pytest
from preprocessor_fakes import make_sample
from preprocessor_harness import PreprocessorHarness, Pulled, harness

ROW: dict[str, Any] = {
    "model": {"maxModelLen": 16},
    "trainers": {"microBatchTokens": 16},
    "staleness": {"policy": "slack", "eta": 1, "cIdle": 4},
}
TASK: dict[str, Any] = {"path": "tests.tasks:Task", "groupSize": 2, "sampling": {"maxTokens": 8}}
SAMPLES = [make_sample(0, 1.0, sampled=5), make_sample(1, 0.0, sampled=5)]


async def roll_out(preprocessor: PreprocessorHarness, num_groups: int) -> list[str]:
    """Groups whose two trajectories fill one row of 16."""
    leases = (await preprocessor.lease(num_groups)).leases
    assert len(leases) == num_groups
    for lease in leases:
        await preprocessor.publish(lease, samples=SAMPLES)
    return [lease.group_id for lease in leases]


async def part(
    preprocessor: PreprocessorHarness, step: int, batch_id: str = "", num_had: int = 0
) -> Pulled:
    pulled = await preprocessor.pull_once(step, batch_id=batch_id, num_had=num_had)
    assert isinstance(pulled, Pulled), pulled
    return pulled


async def test_a_row_is_sent_before_the_last_group_is_there(tmp_path: Path) -> None:
    async with harness(tmp_path, task=TASK, **ROW) as preprocessor:
        await preprocessor.begin()
        assert await preprocessor.pull_once(0, wait_s=0.05) == "no group ready, 0 running"
        await roll_out(preprocessor, 1)
        first = await part(preprocessor, 0)
        assert (first.plan.provisional, first.plan.group_ids, len(first.rows)) == (
            True,
            ("0-0",),
            1,
        )
        assert first.rows[0].sequence_lengths == (8, 8)
        again = await part(preprocessor, 0)
        assert again.plan == first.plan
        waiting = await preprocessor.pull_once(
            0, wait_s=0.05, batch_id=first.plan.batch_id, num_had=1
        )
        assert waiting == "no group ready, 0 running"
        await roll_out(preprocessor, 2)
        second = await part(preprocessor, 0, first.plan.batch_id, 1)
        assert not second.plan.provisional
        assert second.plan.batch_id == first.plan.batch_id
        assert second.plan.group_ids == ("0-0", "0-1")
        assert (
            second.plan.num_micro_batches,
            second.plan.num_sequences,
            second.plan.num_trained_tokens,
        ) == (2, 4, 20)
        assert [row.index for row in second.rows] == [1]
        assert second.rows[0].group_numbers == (1, 1)
        assert second.plan.metrics["packing_fill"] == 1.0
        assert second.plan.metrics["reward_mean"] == 0.5
        await preprocessor.commit(0, second.plan.group_ids)
        await preprocessor.unacknowledged(1)
        await preprocessor.mark_published(1)
        third = await part(preprocessor, 1, first.plan.batch_id, 2)
        assert third.plan.group_ids == ("0-2",)


async def test_every_rank_gets_the_same_number_of_rows(tmp_path: Path) -> None:
    async with harness(tmp_path, task=TASK, algorithm={"groupsPerStep": 3}, **ROW) as preprocessor:
        await preprocessor.begin()
        await roll_out(preprocessor, 2)
        first = await preprocessor.pull(0, 0, 2)
        assert first.plan.provisional
        await roll_out(preprocessor, 1)
        ranks = [await preprocessor.pull_grown(0, rank, 2) for rank in (0, 1)]
        assert ranks[0].plan == ranks[1].plan
        assert ranks[0].plan.batch_id == first.plan.batch_id
        assert len(ranks[0].rows) == len(ranks[1].rows) == ranks[0].plan.num_micro_batches
        lengths = [length for rank in ranks for row in rank.rows for length in row.sequence_lengths]
        assert lengths == [8] * 6
        alone = await preprocessor.pull_grown(0, 0, 1)
        assert alone.plan.batch_id != first.plan.batch_id
        assert alone.plan.group_ids == first.plan.group_ids[:2] + ranks[0].plan.group_ids[2:]


async def test_a_crash_half_way_gives_another_batch_from_its_first_row_on(tmp_path: Path) -> None:
    async with harness(tmp_path, task=TASK, **ROW) as preprocessor:
        await preprocessor.begin()
        await roll_out(preprocessor, 1)
        first = await part(preprocessor, 0)
        await preprocessor.crash()
        again = await part(preprocessor, 0, first.plan.batch_id, 1)
        assert again.plan.batch_id != first.plan.batch_id
        assert (again.plan.group_ids, again.plan.provisional, len(again.rows)) == (
            ("0-0",),
            True,
            1,
        )
        await roll_out(preprocessor, 1)
        whole = await preprocessor.pull_grown(0)
        assert whole.plan.group_ids == ("0-0", "0-1")
        await preprocessor.commit(0, whole.plan.group_ids)
        await preprocessor.unacknowledged(0)


async def test_a_rewind_half_way_leaves_nothing_of_the_batch(tmp_path: Path) -> None:
    async with harness(tmp_path, task=TASK, **ROW) as preprocessor:
        await preprocessor.begin()
        await roll_out(preprocessor, 1)
        await part(preprocessor, 0)
        await preprocessor.restore()
        await preprocessor.mark_published(0)
        await roll_out(preprocessor, 2)
        whole = await preprocessor.pull_grown(0)
        assert whole.plan.group_ids == ("1-0", "1-1")


@pytest.mark.parametrize("eta", [0, 2])
async def test_a_run_of_a_streaming_policy_keeps_its_bound(tmp_path: Path, eta: int) -> None:
    policy: dict[str, Any] = {"policy": "slack", "eta": eta, "cIdle": 6, "cBusy": 6}
    async with harness(tmp_path, task=TASK, **(ROW | {"staleness": policy})) as preprocessor:
        await preprocessor.begin()
        births: dict[str, int] = {}
        lags = []
        for step in range(5):
            for lease in (await preprocessor.lease(9, wait_s=0.05)).leases:
                births[lease.group_id] = step
                samples = [
                    make_sample(index, float(index), sampled=5, version=step) for index in (0, 1)
                ]
                await preprocessor.publish(lease, samples=samples)
            pulled = await preprocessor.pull_grown(step)
            lags += [step - births[group_id] for group_id in pulled.plan.group_ids]
            await preprocessor.commit(step, pulled.plan.group_ids)
            await preprocessor.mark_published(step + 1)
        assert max(lags) == eta
