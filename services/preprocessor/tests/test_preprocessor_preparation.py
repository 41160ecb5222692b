"""What of a group is trained, by which rule."""

from dataclasses import replace

import numpy as np
import pytest
from preprocessor_harness import make_group, make_job, make_sample

from pipelinerl_common.settings import OverlongSettings
from pipelinerl_common.types import FinishReason, VersionRun
from pipelinerl_preprocessor.drops import DropReason
from pipelinerl_preprocessor.preparation import Preparation, PreparedGroup, overlong_penalty


def prepare(*samples: object, **sections: dict[str, object]) -> PreparedGroup:
    sections = {"task": {"groupSize": len(samples), "sampling": {"maxTokens": 32}}, **sections}
    result = Preparation(make_job(**sections).spec).prepare(make_group("0-0", samples=samples))  # type: ignore[arg-type]
    assert isinstance(result, PreparedGroup), result
    return result


def test_an_empty_completion_counts_in_the_baseline_and_as_a_sequence_but_has_no_tokens() -> None:
    group = prepare(make_sample(0, 3.0), make_sample(1, 0.0, sampled=0), make_sample(2, 0.0))
    assert [sequence.advantage for sequence in group.sequences] == [3.0, -1.5]
    assert group.num_sequences == 3
    assert group.rewards == (3.0, 0.0, 0.0)
    assert group.completion_lengths == (4, 0, 4)


@pytest.mark.parametrize(
    ("prompt", "sampled", "sections"),
    [
        (45, 20, {}),
        (20, 21, {"model": {"maxModelLen": 40}, "trainers": {"microBatchTokens": 64}}),
    ],
)
def test_an_over_long_sample_counts_in_the_baseline_only(prompt: int, sampled: int, sections: dict[str, object]) -> None:
    long = make_sample(0, 3.0, prompt=prompt, sampled=sampled)
    group = prepare(long, make_sample(1, 0.0), make_sample(2, 0.0), **sections)  # type: ignore[arg-type]
    assert [sequence.advantage for sequence in group.sequences] == [-1.5, -1.5]
    assert (group.num_sequences, group.num_overlong, group.num_masked) == (2, 1, 0)


def test_a_sample_exactly_as_long_as_a_row_is_trained() -> None:
    group = prepare(make_sample(0, 3.0, prompt=44, sampled=20), make_sample(1, 0.0))
    assert [sequence.num_tokens for sequence in group.sequences] == [64, 7]


def test_truncated_completions_are_trained_or_masked_as_the_job_says() -> None:
    samples = (make_sample(0, 1.0, finish=FinishReason.LENGTH), make_sample(1, 0.0))
    kept = prepare(*samples)
    assert (len(kept.sequences), kept.num_sequences, kept.num_masked) == (2, 2, 0)
    masked = prepare(*samples, algorithm={"overlong": {"completions": "mask"}})
    assert [sequence.advantage for sequence in masked.sequences] == [-1.0]
    assert (masked.num_sequences, masked.num_masked) == (1, 1)


def test_a_group_of_masked_completions_alone_has_no_tokens() -> None:
    samples = tuple(make_sample(index, float(index), finish=FinishReason.LENGTH) for index in range(2))
    spec = make_job(algorithm={"overlong": {"completions": "mask"}}).spec
    assert Preparation(spec).prepare(make_group("0-0", samples=samples)) is DropReason.NO_TOKENS


@pytest.mark.parametrize(
    ("segments", "expected"),
    [((3, 6), 0.0), ((3, 7), -0.25), ((3, 9), -0.75), ((3, 10), -1.0), ((3, 12), -1.0), ((1, 5, 30, 8), -0.5), ((4,), 0.0)],
)
def test_the_soft_penalty_falls_to_minus_one(segments: tuple[int, ...], expected: float) -> None:
    sample = replace(make_sample(0, 1.0), segment_lengths=segments)
    assert overlong_penalty(sample, OverlongSettings(penalty_buffer_tokens=4), max_tokens=10) == expected
    assert overlong_penalty(sample, OverlongSettings(), max_tokens=10) == 0.0


def test_the_penalty_shapes_the_advantage_and_not_the_reported_reward() -> None:
    samples = (make_sample(0, 1.0, sampled=32), make_sample(1, 1.0, sampled=4))
    group = prepare(*samples, algorithm={"overlong": {"penaltyBufferTokens": 8}})
    assert [sequence.advantage for sequence in group.sequences] == [-1.0, 1.0]
    assert group.rewards == (1.0, 1.0)


def test_equal_rewards_are_kept_or_dropped_as_the_job_says() -> None:
    group = make_group("0-0", samples=(make_sample(0, 1.0), make_sample(1, 1.0)))
    kept = Preparation(make_job().spec).prepare(group)
    assert isinstance(kept, PreparedGroup)
    assert [sequence.advantage for sequence in kept.sequences] == [0.0, 0.0]
    dropping = make_job(algorithm={"dropZeroAdvantage": True}).spec
    assert Preparation(dropping).prepare(group) is DropReason.ZERO_ADVANTAGE


def test_an_advantage_that_does_not_fit_32_bits_is_not_finite() -> None:
    group = make_group("0-0", samples=(make_sample(0, 3e38), make_sample(1, -3e38)))
    assert Preparation(make_job().spec).prepare(group) is DropReason.NON_FINITE


def test_a_value_head_gets_the_reward_as_its_target() -> None:
    group = prepare(make_sample(0, 1.0), make_sample(1, 0.0), algorithm={"baseline": "value"})
    assert [(sequence.advantage, sequence.target_return) for sequence in group.sequences] == [(1.0, 1.0), (0.0, 0.0)]


def test_the_reference_column_follows_the_sequences() -> None:
    group = prepare(make_sample(0, 1.0), make_sample(1, 0.0, sampled=0), make_sample(2, 0.0, sampled=2))
    scored = group.with_reference([np.full(4, -1, np.float32), np.full(2, -2, np.float32)])
    columns = [sequence.ref_logprobs_T for sequence in scored.sequences]
    assert [None if column is None else column.tolist() for column in columns] == [[-1] * 4, [-2] * 2]


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (make_group("0-0", prompt_index=5), None),
        (make_group("0-0", prompt_index=6), DropReason.MISMATCH),
        (make_group("0-0", prompt_index=5, samples=[make_sample(i, 0.0) for i in range(3)]), DropReason.MISMATCH),
        (make_group("0-0", prompt_index=5, temperature=0.9), DropReason.TEMPERATURE),
        (make_group("0-0", prompt_index=5, samples=[make_sample(0, float("inf")), make_sample(1, 0.0)]), DropReason.NON_FINITE),
        (make_group("0-0", prompt_index=5, samples=[make_sample(0, 0.0, logprob=float("nan"))] * 2), DropReason.NON_FINITE),
        (make_group("0-0", prompt_index=5, version=9), DropReason.BAD_VERSION),
        (make_group("0-0", prompt_index=5, version=-1), DropReason.BAD_VERSION),
        (make_group("0-0", prompt_index=5, version=8), None),
        (make_group("0-0", prompt_index=5, samples=[make_sample(0, 0.0)]), DropReason.TOO_FEW_SAMPLES),
    ],
)
def test_faults(group: object, expected: DropReason | None) -> None:
    assert Preparation(make_job().spec).fault(group, prompt_index=5, newest_version=8) is expected  # type: ignore[arg-type]


def test_version_runs_stay_with_their_tokens() -> None:
    mixed = replace(make_sample(0, 1.0), version_runs=(VersionRun(3, 1), VersionRun(4, 3)))
    assert prepare(mixed, make_sample(1, 0.0)).sequences[0].version_runs == mixed.version_runs
