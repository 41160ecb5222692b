"""The whole service over real gRPC and a real nats-server: what actors and trainers see."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from preprocessor_fakes import make_sample
from preprocessor_harness import harness

from pipelinerl.v1 import admission_pb2 as pb
from pipelinerl_common.errors import PermanentError, Refused, Unavailable


async def test_a_step_goes_from_lease_to_acknowledgement(tmp_path: Path) -> None:
    async with harness(tmp_path) as preprocessor:
        await preprocessor.begin()
        leases = await preprocessor.roll_out(4)
        assert [(lease.group_id, lease.prompt_index, lease.attempt) for lease in leases] == [
            ("0-0", 0, 0), ("0-1", 1, 0), ("0-2", 2, 0), ("0-3", 3, 0),
        ]  # fmt: skip
        await preprocessor.unacknowledged(4)

        pulled = await preprocessor.pull(0)
        assert pulled.plan.group_ids == ("0-0", "0-1")
        assert (pulled.plan.num_sequences, pulled.plan.num_trained_tokens) == (4, 16)
        assert pulled.plan.metrics["reward_mean"] == 0.5
        assert pulled.plan.metrics["success_mean"] == 0.5
        assert pulled.plan.metrics["completion_length_mean"] == 4
        assert pulled.plan.metrics["packing_fill"] == 28 / 32
        [row] = pulled.rows
        assert row.sequence_lengths == (7, 7, 7, 7)
        assert (
            row.advantages_L[row.loss_mask_L == 1].tolist()
            == [1.0] * 4 + [-1.0] * 4 + [1.0] * 4 + [-1.0] * 4
        )
        await preprocessor.unacknowledged(4)

        await preprocessor.commit(0, pulled.plan.group_ids)
        await preprocessor.unacknowledged(2)
        line = json.loads((tmp_path / "output" / "trained.jsonl").read_text())
        groups = [{"group_id": "0-0", "prompt_index": 0}, {"group_id": "0-1", "prompt_index": 1}]
        assert line == {"step": 0, "incarnation": 0, "groups": groups}
        assert await preprocessor.metric("groups_trained_total", 2) == 2


async def test_nothing_is_served_before_restore_and_nothing_granted_before_publish(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as preprocessor:
        with pytest.raises(Unavailable, match="Restore"):
            await preprocessor.lease(1)
        with pytest.raises(Unavailable, match="Restore"):
            await preprocessor.pull_once(0)
        with pytest.raises(Unavailable, match="Restore"):
            await preprocessor.mark_published(0)
        await preprocessor.restore()
        response = await preprocessor.lease(1, wait_s=0.1)
        assert not response.leases
        assert response.served_version == -1
        await preprocessor.mark_published(0)
        response = await preprocessor.lease(1)
        assert len(response.leases) == 1
        assert response.served_version == 0


async def test_a_long_poll_ends_when_a_publish_admits_more(tmp_path: Path) -> None:
    async with harness(tmp_path) as preprocessor:
        await preprocessor.begin()
        await preprocessor.roll_out(4)
        assert not (await preprocessor.lease(1, wait_s=0.05)).leases
        waiting = asyncio.create_task(preprocessor.lease(8, wait_s=20))
        await preprocessor.train(0)
        assert [lease.group_id for lease in (await waiting).leases] == ["0-4", "0-5"]


async def test_a_pull_answers_wait_with_a_reason_at_its_deadline(tmp_path: Path) -> None:
    async with harness(tmp_path) as preprocessor:
        await preprocessor.begin()
        await preprocessor.roll_out(1)
        await preprocessor.metric("queue_groups{stage=ready}", 1)
        assert await preprocessor.pull_once(0, wait_s=0.1) == "1 of 2 groups ready, 0 running"


async def test_wrong_steps_are_refused_with_both_numbers(tmp_path: Path) -> None:
    async with harness(tmp_path) as preprocessor:
        await preprocessor.begin()
        await preprocessor.roll_out(4)
        with pytest.raises(Refused, match="step 2 is neither the current one, 0"):
            await preprocessor.pull_once(2)
        pulled = await preprocessor.pull(0)
        assert await preprocessor.pull_once(1, wait_s=0.05) == "step 0 is not committed yet"
        with pytest.raises(Refused, match="step 1 cannot be committed, the next one is 0"):
            await preprocessor.commit(1, pulled.plan.group_ids)
        with pytest.raises(Refused, match="0-99"):
            await preprocessor.commit(0, ["0-99"])
        with pytest.raises(PermanentError, match="once"):
            await preprocessor.commit(0, [])
        await preprocessor.commit(0, pulled.plan.group_ids)
        await preprocessor.commit(0, pulled.plan.group_ids)
        with pytest.raises(Refused, match="version 5"):
            await preprocessor.mark_published(5)
        with pytest.raises(Refused, match="1 steps are committed, not 0"):
            await preprocessor.snapshot(0)


async def test_bad_requests_name_the_field(tmp_path: Path) -> None:
    async with harness(tmp_path) as preprocessor:
        await preprocessor.begin()
        with pytest.raises(PermanentError, match="rank=2 must be below num_ranks=2"):
            await preprocessor.pull_once(0, rank=2, num_ranks=2)
        with pytest.raises(PermanentError, match="wait_s=31"):
            await preprocessor.pull_once(0, wait_s=31)
        with pytest.raises(PermanentError, match="wait_s=nan"):
            await preprocessor.lease(1, wait_s=float("nan"))
        with pytest.raises(PermanentError, match="actor_id"):
            await preprocessor.lease(1, actor="")
        with pytest.raises(PermanentError, match="outcome=0"):
            await preprocessor.report("0-0:0", pb.GROUP_OUTCOME_UNSPECIFIED)


async def test_two_ranks_get_equal_rows_of_one_batch(tmp_path: Path) -> None:
    async with harness(tmp_path) as preprocessor:
        await preprocessor.begin()
        await preprocessor.roll_out(2)
        first, second = await asyncio.gather(preprocessor.pull(0, 0, 2), preprocessor.pull(0, 1, 2))
        assert first.plan == second.plan
        assert (
            [row.sequence_lengths for row in first.rows]
            == [row.sequence_lengths for row in second.rows]
            == [(7, 7)]
        )
        assert sorted(first.rows[0].group_numbers + second.rows[0].group_numbers) == [0, 0, 1, 1]
        again = await preprocessor.pull(0, 1, 2)
        assert again.plan == second.plan
        np.testing.assert_array_equal(again.rows[0].advantages_L, second.rows[0].advantages_L)
        alone = await preprocessor.pull(0, 0, 1)
        assert alone.plan.group_ids == first.plan.group_ids
        assert alone.plan.batch_id != first.plan.batch_id


async def test_a_rank_that_is_ahead_waits_for_the_commit(tmp_path: Path) -> None:
    async with harness(tmp_path) as preprocessor:
        await preprocessor.begin()
        await preprocessor.roll_out(4)
        pulled = await preprocessor.pull(0)
        ahead = asyncio.create_task(preprocessor.pull(1))
        await preprocessor.commit(0, pulled.plan.group_ids)
        assert (await ahead).plan.group_ids == ("0-2", "0-3")


async def test_the_last_commit_ends_the_run_for_all(tmp_path: Path) -> None:
    async with harness(tmp_path) as preprocessor:
        await preprocessor.begin()
        await preprocessor.roll_out(4)
        pulled = await preprocessor.pull(0)
        waiting = asyncio.create_task(preprocessor.lease(1, wait_s=20))
        await preprocessor.commit(0, pulled.plan.group_ids, last=True)
        assert (await waiting).state == pb.RUN_STATE_DONE
        assert await preprocessor.pull_once(1) is None
        assert not (await preprocessor.lease(1)).leases


async def test_groups_that_cannot_be_trained_are_dropped_with_a_reason_and_their_slots_come_back(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as preprocessor:
        await preprocessor.begin()
        good = make_sample(1, 1.0)
        over_long = [make_sample(index, float(index), prompt=40, sampled=30) for index in range(2)]
        cases: dict[str, dict[str, Any]] = {
            "non_finite": {"samples": (make_sample(0, float("nan")), good)},
            "temperature": {"temperature": 0.7},
            "bad_version": {"version": 2},
            "mismatch": {"prompt_index": 77},
            "too_few_samples": {"samples": (good,)},
            "no_tokens": {"samples": over_long},
        }
        for fields in [*cases.values(), {"samples": (make_sample(0, 1.0, logprob=-np.inf), good)}]:
            [lease] = (await preprocessor.lease(1)).leases
            await preprocessor.publish(lease, **fields)
        expected = {f"groups_dropped_total{{reason={reason}}}": 1.0 for reason in cases}
        assert await preprocessor.metric("tokens_dropped_total{reason=non_finite}", 16) == 16
        counted = await preprocessor.metrics_with("groups_dropped_total{reason=no_tokens}", 1)
        assert {name: counted[name] for name in expected} == {
            **expected,
            "groups_dropped_total{reason=non_finite}": 2.0,
        }
        await preprocessor.unacknowledged(0)
        assert len((await preprocessor.lease(9)).leases) == 4


async def test_strange_groups_are_dropped_and_counted(tmp_path: Path) -> None:
    async with harness(tmp_path) as preprocessor:
        await preprocessor.begin()
        [lease, other] = (await preprocessor.lease(2)).leases
        lease.group_id, known = "0-99", lease.group_id
        await preprocessor.publish(lease)
        lease.group_id = "not an id"
        await preprocessor.publish(lease)
        assert await preprocessor.metric("groups_dropped_total{reason=unknown}", 2) == 2
        lease.group_id = known
        await preprocessor.publish(lease)
        await preprocessor.publish(lease, attempt=1)
        assert await preprocessor.metric("groups_dropped_total{reason=duplicate}", 1) == 1
        await preprocessor.publish(other)
        assert (await preprocessor.pull(0)).plan.group_ids == ("0-0", "0-1")


async def test_the_ring_buffer_drops_the_oldest_and_gives_its_slot_back(tmp_path: Path) -> None:
    async with harness(tmp_path, preprocessor={"ringBufferGroups": 2}) as preprocessor:
        await preprocessor.begin()
        leases = await preprocessor.roll_out(3)
        assert await preprocessor.metric("groups_dropped_total{reason=ring_buffer}", 1) == 1
        assert (await preprocessor.pull(0)).plan.group_ids == (
            leases[1].group_id,
            leases[2].group_id,
        )
        assert len((await preprocessor.lease(9)).leases) == 2


async def test_groups_without_a_signal_are_dropped_when_asked(tmp_path: Path) -> None:
    async with harness(
        tmp_path, algorithm={"groupsPerStep": 2, "dropZeroAdvantage": True}
    ) as preprocessor:
        await preprocessor.begin()
        [lease] = (await preprocessor.lease(1)).leases
        await preprocessor.publish(lease, samples=(make_sample(0, 1.0), make_sample(1, 1.0)))
        assert await preprocessor.metric("groups_dropped_total{reason=zero_advantage}", 1) == 1
        assert await preprocessor.metric("tokens_dropped_total{reason=zero_advantage}", 8) == 8


async def test_reports_give_slots_back(tmp_path: Path) -> None:
    async with harness(tmp_path, preprocessor={"maxGroupAttempts": 2}) as preprocessor:
        await preprocessor.begin()
        first, second, *_ = (await preprocessor.lease(4)).leases
        await preprocessor.report(first.lease_id, pb.GROUP_OUTCOME_STARTED, served_version=0)
        await preprocessor.report(
            first.lease_id, pb.GROUP_OUTCOME_FAILED, reason="verifier_timeout", tokens_wasted=5
        )
        await preprocessor.report(
            first.lease_id, pb.GROUP_OUTCOME_FAILED, reason="verifier_timeout", tokens_wasted=5
        )
        assert await preprocessor.metric("groups_dropped_total{reason=verifier_timeout}", 1) == 1
        assert await preprocessor.metric("tokens_dropped_total{reason=verifier_timeout}", 5) == 5
        [replacement] = (await preprocessor.lease(9)).leases
        assert (replacement.group_id, replacement.prompt_index) == ("0-4", 4)

        await preprocessor.report(second.lease_id, pb.GROUP_OUTCOME_HANDED_BACK)
        [again] = (await preprocessor.lease(9)).leases
        assert (again.group_id, again.attempt) == (second.group_id, 1)
        await preprocessor.report(again.lease_id, pb.GROUP_OUTCOME_HANDED_BACK)
        assert await preprocessor.metric("groups_dropped_total{reason=expired}", 1) == 1


async def test_a_new_session_takes_the_old_ones_leases_at_once(tmp_path: Path) -> None:
    async with harness(tmp_path) as preprocessor:
        await preprocessor.begin()
        old = (await preprocessor.lease(4)).leases
        waiting = asyncio.create_task(preprocessor.lease(1, wait_s=20, running=[old[0].lease_id]))
        new = (await preprocessor.lease(4, session="session-2")).leases
        assert [lease.group_id for lease in new] == [lease.group_id for lease in old]
        assert [lease.attempt for lease in new] == [1, 1, 1, 1]
        assert list((await waiting).cancelled_lease_ids) == [old[0].lease_id]


async def test_a_silent_actor_loses_its_leases_and_the_late_result_still_counts(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path, preprocessor={"leaseSeconds": 1.5}) as preprocessor:
        await preprocessor.begin()
        old = (await preprocessor.lease(2, actor="silent")).leases
        other = (await preprocessor.lease(2)).leases
        running = [lease.lease_id for lease in other]
        again = (await preprocessor.lease(1, wait_s=10, running=running)).leases
        assert (again[0].group_id, again[0].attempt) == (old[0].group_id, 1)
        await preprocessor.publish(old[0])
        response = await preprocessor.lease(0, running=[again[0].lease_id, *running])
        while not response.cancelled_lease_ids:
            response = await preprocessor.lease(1, wait_s=1, running=[again[0].lease_id, *running])
        assert list(response.cancelled_lease_ids) == [again[0].lease_id]


async def test_messages_of_another_job_or_schema_are_set_aside(tmp_path: Path) -> None:
    async with harness(tmp_path) as preprocessor:
        await preprocessor.begin()
        [lease] = (await preprocessor.lease(1)).leases
        await preprocessor.publish(lease, job="other")
        assert await preprocessor.metric("stream_set_aside_total{reason=job}", 1) == 1
        await preprocessor.unacknowledged(0)
