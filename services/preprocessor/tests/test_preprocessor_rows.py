"""Columns of packed rows, by hand."""

import time

import numpy as np
from preprocessor_fakes import make_group, make_job, make_sample

from pipelinerl_common.types import VersionRun, merge_runs
from pipelinerl_preprocessor.batch import RowLayout, assemble
from pipelinerl_preprocessor.preparation import Preparation, PreparedGroup
from pipelinerl_preprocessor.rows import TrainSequence, build_row


def sequence(
    segments: tuple[int, ...],
    runs: tuple[VersionRun, ...],
    *,
    first_id: int = 0,
    advantage: float = 1.0,
) -> TrainSequence:
    num_tokens, num_sampled = sum(segments), sum(segments[1::2])
    return TrainSequence(
        token_ids_S=np.arange(first_id, first_id + num_tokens, dtype=np.uint32),
        segment_lengths=segments,
        logprobs_T=np.arange(1, num_sampled + 1, dtype=np.float32) / np.float32(-8),
        ref_logprobs_T=np.arange(1, num_sampled + 1, dtype=np.float32) / np.float32(-4),
        version_runs=runs,
        advantage=advantage,
        returns_T=np.full(num_sampled, 0.5, np.float32),
        reward=2.0,
    )


def test_two_sequences_and_padding() -> None:
    single_turn = sequence((2, 3), (VersionRun(6, 2), VersionRun(7, 1)), first_id=10, advantage=2.0)
    multi_turn = sequence((1, 1, 1, 1), (VersionRun(7, 2),), first_id=20, advantage=-1.0)
    row = build_row(4, [(0, single_turn), (3, multi_turn)], 12, 0.7, reference=True, returns=True)
    assert (row.index, row.num_slots, row.num_trained, row.temperature) == (4, 12, 5, 0.7)
    assert row.sequence_lengths == (5, 4)
    assert row.group_numbers == (0, 3)
    assert row.rewards == (2.0, 2.0)
    assert row.sequence_weights == (1.0, 1.0)
    assert row.input_ids_L.tolist() == [10, 11, 12, 13, 14, 20, 21, 22, 23, 0, 0, 0]
    assert row.loss_mask_L.tolist() == [0, 0, 1, 1, 1, 0, 1, 0, 1, 0, 0, 0]
    assert row.old_logprobs_L.tolist() == [
        0,
        0,
        -0.125,
        -0.25,
        -0.375,
        0,
        -0.125,
        0,
        -0.25,
        0,
        0,
        0,
    ]
    assert row.ref_logprobs_L is not None
    assert row.ref_logprobs_L.tolist() == [0, 0, -0.25, -0.5, -0.75, 0, -0.25, 0, -0.5, 0, 0, 0]
    assert row.advantages_L.tolist() == [0, 0, 2, 2, 2, 0, -1, 0, -1, 0, 0, 0]
    assert row.returns_L is not None
    assert row.returns_L.tolist() == [0, 0, 0.5, 0.5, 0.5, 0, 0.5, 0, 0.5, 0, 0, 0]
    assert row.version_runs == (VersionRun(6, 2), VersionRun(7, 3))


def test_a_filler_row_has_all_columns_and_no_loss() -> None:
    row = build_row(0, [], 8, 1.0, reference=True, returns=True)
    assert row.sequence_lengths == ()
    assert row.num_trained == 0
    assert row.ref_logprobs_L is not None
    assert row.returns_L is not None
    assert row.input_ids_L.tolist() == [0] * 8


def test_neighbouring_runs_of_a_version_join() -> None:
    runs = [VersionRun(1, 2), VersionRun(1, 4), VersionRun(3, 1), VersionRun(1, 1)]
    assert merge_runs(runs) == (VersionRun(1, 6), VersionRun(3, 1), VersionRun(1, 1))


def prepared(group_id: str, lengths: list[int]) -> PreparedGroup:
    samples = [
        make_sample(index, float(index % 2), prompt=8, sampled=length)
        for index, length in enumerate(lengths)
    ]
    job = make_job(
        task={"groupSize": len(samples)},
        model={"maxModelLen": 4096},
        trainers={"microBatchTokens": 4096},
    )
    result = Preparation(job.spec).prepare(make_group(group_id, samples=samples))
    assert isinstance(result, PreparedGroup)
    return result


def test_the_plan_sums_over_all_ranks_and_rows() -> None:
    groups = [prepared("0-0", [5, 9, 20, 1]), prepared("0-1", [7, 7, 0, 30])]
    batch = assemble(
        3, groups, RowLayout(2, 64, 1.0, reference=False, returns=False), publish_after=True
    )
    rows = [row for rank in batch.rows for row in rank]
    assert batch.plan.num_sequences == 8
    assert sum(len(row.sequence_lengths) for row in rows) == 7
    assert (
        batch.plan.num_trained_tokens
        == sum(row.num_trained for row in rows)
        == 5 + 9 + 20 + 1 + 7 + 7 + 30
    )
    assert {len(rank) for rank in batch.rows} == {batch.plan.num_micro_batches}
    assert batch.plan.metrics["completion_length_mean"] == 79 / 8
    same = assemble(
        3, groups, RowLayout(2, 64, 1.0, reference=False, returns=False), publish_after=True
    )
    assert same.plan.batch_id == batch.plan.batch_id


def test_a_million_samples_a_minute_are_packed_to_columns() -> None:
    rng = np.random.default_rng(0)
    groups = [
        prepared(f"0-{number}", np.clip(rng.lognormal(5.5, 1.0, 8), 1, 4000).astype(int).tolist())
        for number in range(256)
    ]
    layout = RowLayout(8, 4096, 1.0, reference=False, returns=False)
    times = []
    for _ in range(3):
        start = time.process_time()
        batch = assemble(0, groups, layout, publish_after=True)
        times.append(time.process_time() - start)
    assert 2048 / min(times) * 60 >= 1e6
    assert batch.plan.metrics["packing_fill"] >= 0.97
    assert batch.plan.metrics["packing_imbalance"] <= 0.02
