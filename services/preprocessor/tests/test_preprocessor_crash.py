"""kill -9 at every point of a step, rewinds of the trainer, an absent stream: what continues and
what does not.
"""

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from preprocessor_harness import PreprocessorHarness, harness

from pipelinerl.v1 import batches_pb2 as pb
from pipelinerl_common.errors import PermanentError, Refused, Unavailable
from pipelinerl_common.stream import NatsServer


def trained(output: Path) -> list[tuple[int, list[str]]]:
    """(step, group ids) of each line of trained.jsonl."""
    lines = [json.loads(line) for line in (output / "trained.jsonl").read_text().splitlines()]
    return [(line["step"], [group["group_id"] for group in line["groups"]]) for line in lines]


def trained_prompts(output: Path) -> list[int]:
    lines = [json.loads(line) for line in (output / "trained.jsonl").read_text().splitlines()]
    return [group["prompt_index"] for line in lines for group in line["groups"]]


def ids(leases: Sequence[object]) -> list[str]:
    return [str(getattr(lease, "group_id", lease)) for lease in leases]


async def test_killed_before_the_first_restore_it_waits_for_it_again(tmp_path: Path) -> None:
    async with harness(tmp_path) as preprocessor:
        await preprocessor.crash()
        await preprocessor.begin()
        assert ids((await preprocessor.lease(1)).leases) == ["0-0"]


async def test_killed_with_leases_out_the_actor_keeps_them(tmp_path: Path) -> None:
    async with harness(tmp_path) as preprocessor:
        await preprocessor.begin()
        leases = (await preprocessor.lease(3)).leases
        await preprocessor.crash()
        response = await preprocessor.lease(9, running=[lease.lease_id for lease in leases])
        assert not response.cancelled_lease_ids
        assert ids(response.leases) == ["0-3"]
        assert response.served_version == 0
        for lease in leases:
            await preprocessor.publish(lease)
        assert (await preprocessor.pull(0)).plan.group_ids == ("0-0", "0-1")


async def test_killed_with_leases_out_and_a_new_actor_grants_them_again(tmp_path: Path) -> None:
    async with harness(tmp_path, preprocessor={"leaseSeconds": 1.5}) as preprocessor:
        await preprocessor.begin()
        leases = (await preprocessor.lease(4)).leases
        await preprocessor.crash()
        again = (await preprocessor.lease(9, actor="actor-1", wait_s=20)).leases
        assert [(lease.group_id, lease.attempt) for lease in again] == [
            (lease.group_id, 1) for lease in leases
        ]


async def test_killed_with_groups_ready_they_come_back_in_order(tmp_path: Path) -> None:
    async with harness(
        tmp_path, staleness={"policy": "conventional", "stepsPerGeneration": 2}
    ) as preprocessor:
        await preprocessor.begin()
        leases = (await preprocessor.lease(4)).leases
        for place in (2, 0, 3, 1):
            await preprocessor.publish(leases[place])
        await preprocessor.metric("queue_groups{stage=ready}", 4)
        await preprocessor.crash()
        assert (await preprocessor.pull(0)).plan.group_ids == ("0-2", "0-0")


@pytest.mark.parametrize("num_crashes", [1, 2])
async def test_killed_between_pull_and_commit_the_commit_counts(
    tmp_path: Path, num_crashes: int
) -> None:
    async with harness(tmp_path) as preprocessor:
        await preprocessor.begin()
        await preprocessor.roll_out(4)
        pulled = await preprocessor.pull(0)
        for _ in range(num_crashes):
            await preprocessor.crash()
        await preprocessor.commit(0, pulled.plan.group_ids)
        await preprocessor.unacknowledged(2)
        assert (await preprocessor.pull(1)).plan.group_ids == ("0-2", "0-3")
        assert trained(tmp_path / "output") == [(0, ["0-0", "0-1"])]


async def test_killed_between_pull_and_commit_another_pull_gives_the_same_batch(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as preprocessor:
        await preprocessor.begin()
        await preprocessor.roll_out(4)
        pulled = await preprocessor.pull(0, 0, 2)
        await preprocessor.crash()
        again = await preprocessor.pull(0, 1, 2)
        assert again.plan.batch_id == pulled.plan.batch_id


async def test_a_commit_of_another_assembly_takes_what_was_trained_and_keeps_the_rest(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as preprocessor:
        await preprocessor.begin()
        await preprocessor.roll_out(4)
        assert (await preprocessor.pull(0)).plan.group_ids == ("0-0", "0-1")
        await preprocessor.commit(0, ["0-1", "0-2"])
        assert (await preprocessor.pull(1)).plan.group_ids == ("0-0", "0-3")
        await preprocessor.unacknowledged(2)


async def test_killed_after_a_commit_nothing_is_trained_twice(tmp_path: Path) -> None:
    async with harness(tmp_path) as preprocessor:
        await preprocessor.begin()
        await preprocessor.roll_out(4)
        pulled = await preprocessor.pull(0)
        await preprocessor.commit(0, pulled.plan.group_ids)
        await preprocessor.crash()
        await preprocessor.commit(0, pulled.plan.group_ids)
        with pytest.raises(Refused, match="step 0 is neither the current one, 1"):
            await preprocessor.pull_once(0)
        await preprocessor.mark_published(1)
        await preprocessor.roll_out(2)
        assert (await preprocessor.pull(1)).plan.group_ids == ("0-2", "0-3")
        assert trained(tmp_path / "output") == [(0, ["0-0", "0-1"])]


async def test_a_commit_whose_journal_entry_was_lost_leaves_no_line_behind(tmp_path: Path) -> None:
    async with harness(tmp_path) as preprocessor:
        await preprocessor.begin()
        await preprocessor.roll_out(4)
        pulled = await preprocessor.pull(0)
        await preprocessor.stop()
        line = {"step": 0, "incarnation": 0, "groups": []}
        (tmp_path / "output" / "trained.jsonl").parent.mkdir(exist_ok=True)
        (tmp_path / "output" / "trained.jsonl").write_text(json.dumps(line) + '\n{"step": 1, "gr')
        await preprocessor.start()
        await preprocessor.commit(0, pulled.plan.group_ids)
        assert trained(tmp_path / "output") == [(0, ["0-0", "0-1"])]


async def test_the_trainer_resumes_at_the_last_commit_without_losing_anything(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as preprocessor:
        await preprocessor.begin()
        leases = await preprocessor.roll_out(4)
        pulled = await preprocessor.pull(0)
        await preprocessor.commit(0, pulled.plan.group_ids)
        snapshot = await preprocessor.snapshot(1)
        assert (
            snapshot.next_prompt_index,
            list(snapshot.open_prompt_indices),
            snapshot.incarnation,
        ) == (4, [2, 3], 0)
        assert await preprocessor.restore(1, snapshot, "again") is False
        assert await preprocessor.restore(1, snapshot, "again") is False
        assert not (await preprocessor.lease(1, wait_s=0.05)).leases
        await preprocessor.mark_published(1)
        assert (await preprocessor.pull(1)).plan.group_ids == (
            leases[2].group_id,
            leases[3].group_id,
        )


async def test_a_rewind_voids_the_lost_timeline_and_replays_no_trained_prompt(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as preprocessor:
        await preprocessor.begin()
        await preprocessor.roll_out(4)
        await preprocessor.train(0)
        snapshot = await preprocessor.snapshot(1)
        late = (await preprocessor.lease(9)).leases
        await preprocessor.train(1)
        await preprocessor.lease(9)  # nothing is left to grant: the next call waits
        [running] = late[:1]
        assert trained_prompts(tmp_path / "output") == [0, 1, 2, 3]

        waiting = asyncio.create_task(preprocessor.lease(1, wait_s=20, running=[running.lease_id]))
        assert await preprocessor.restore(1, snapshot, "rewind") is True
        assert await preprocessor.restore(1, snapshot, "rewind") is True
        assert list((await waiting).cancelled_lease_ids) == [running.lease_id]
        await preprocessor.publish(running)
        assert await preprocessor.metric("groups_dropped_total{reason=rollback}", 1) >= 1
        assert trained(tmp_path / "output") == [(0, ["0-0", "0-1"])]

        await preprocessor.mark_published(1)
        leases = await preprocessor.roll_out(4, version=1)
        assert [(lease.group_id, lease.prompt_index) for lease in leases] == [
            ("1-0", 2),
            ("1-1", 3),
            ("1-2", 4),
            ("1-3", 5),
        ]
        await preprocessor.train(1)
        await preprocessor.train(2)
        assert trained_prompts(tmp_path / "output") == [0, 1, 2, 3, 4, 5]
        await preprocessor.unacknowledged(0)


async def test_killed_after_a_rewind_the_new_timeline_holds(tmp_path: Path) -> None:
    async with harness(tmp_path) as preprocessor:
        await preprocessor.begin()
        await preprocessor.roll_out(4)
        await preprocessor.restore(0)
        await preprocessor.crash()
        await preprocessor.unacknowledged(0)
        await preprocessor.mark_published(0)
        assert ids((await preprocessor.lease(9)).leases) == ["1-0", "1-1", "1-2", "1-3"]


async def test_a_lost_store_is_replaced_by_the_snapshot(tmp_path: Path) -> None:
    snapshot = pb.LedgerSnapshot(
        schema_version=1,
        num_committed_steps=7,
        next_prompt_index=20,
        open_prompt_indices=[15, 18],
        incarnation=2,
    )
    async with harness(tmp_path) as preprocessor:
        assert await preprocessor.restore(7, snapshot) is True
        await preprocessor.mark_published(7)
        leases = await preprocessor.roll_out(4, version=7)
        assert [(lease.group_id, lease.prompt_index) for lease in leases] == [
            ("3-0", 15),
            ("3-1", 18),
            ("3-2", 20),
            ("3-3", 21),
        ]
        assert (await preprocessor.pull(7)).plan.group_ids == ("3-0", "3-1")


async def test_contradictions_in_a_restore_are_refused(tmp_path: Path) -> None:
    async with harness(tmp_path) as preprocessor:
        with pytest.raises(PermanentError, match="num_committed_steps=3"):
            await preprocessor.restore(3)
        with pytest.raises(PermanentError, match="schema_version=0"):
            await preprocessor.restore(0, pb.LedgerSnapshot())
        with pytest.raises(PermanentError, match="open prompts"):
            await preprocessor.restore(
                0, pb.LedgerSnapshot(schema_version=1, open_prompt_indices=[4], next_prompt_index=2)
            )


async def test_many_steps_with_a_kill_in_each_train_every_prompt_once(tmp_path: Path) -> None:
    async with harness(tmp_path) as preprocessor:
        await preprocessor.begin()
        await preprocessor.roll_out(4)
        for step in range(5):
            await _crash_somewhere(preprocessor, step)
            await preprocessor.roll_out(2, version=step + 1)
        prompts = trained_prompts(tmp_path / "output")
        assert prompts == list(range(10))
        keys = await (await preprocessor.stream.journal()).entries()
        assert len(keys) <= 1 + 4 + 2


async def _crash_somewhere(preprocessor: PreprocessorHarness, step: int) -> None:
    """One step with a kill at a point that differs from step to step."""
    if step % 4 == 0:
        await preprocessor.crash()
    pulled = await preprocessor.pull(step)
    if step % 4 == 1:
        await preprocessor.crash()
    await preprocessor.commit(step, pulled.plan.group_ids)
    if step % 4 == 2:
        await preprocessor.crash()
    await preprocessor.mark_published(step + 1)
    if step % 4 == 3:
        await preprocessor.crash()


async def test_a_killed_stream_server_only_delays(tmp_path: Path) -> None:
    async with harness(tmp_path) as preprocessor:
        await preprocessor.begin()
        await preprocessor.roll_out(4)
        pulled = await preprocessor.pull(0)
        os.kill(preprocessor.nats.pid, signal.SIGKILL)
        await preprocessor.nats.wait()
        committing = asyncio.create_task(preprocessor.commit(0, pulled.plan.group_ids))
        async with NatsServer.start(tmp_path / "nats", preprocessor.nats.port):
            try:
                await committing
            except Unavailable:  # its deadline passed first: the trainer calls again
                await preprocessor.commit(0, pulled.plan.group_ids)
            await preprocessor.unacknowledged(2)
            await preprocessor.mark_published(1)
            await preprocessor.roll_out(2, version=1)
            await preprocessor.train(1)
        assert trained(tmp_path / "output") == [(0, ["0-0", "0-1"]), (1, ["0-2", "0-3"])]
