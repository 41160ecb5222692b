"""The rules by which trajectories of a group are trained, masked or dropped."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from preprocessor_fakes import make_group, make_job, make_sample

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.types import FinishReason, Sample, VersionRun
from pipelinerl_preprocessor.groups import DropReason
from pipelinerl_preprocessor.preparation import Preparation, PreparedGroup


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
def test_an_over_long_sample_counts_in_the_baseline_only(
    prompt: int, sampled: int, sections: dict[str, object]
) -> None:
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
    samples = tuple(
        make_sample(index, float(index), finish=FinishReason.LENGTH) for index in range(2)
    )
    spec = make_job(algorithm={"overlong": {"completions": "mask"}}).spec
    assert Preparation(spec).prepare(make_group("0-0", samples=samples)) is DropReason.NO_TOKENS


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
    group = prepare(
        make_sample(0, 1.0), make_sample(1, 0.0, sampled=2), algorithm={"baseline": "value"}
    )
    targets = [
        None if sequence.returns_T is None else sequence.returns_T.tolist()
        for sequence in group.sequences
    ]
    assert targets == [[1.0] * 4, [0.0] * 2]
    discounted = prepare(
        make_sample(0, 1.0, sampled=3), algorithm={"baseline": "value", "discount": 0.5}
    )
    assert discounted.sequences[0].returns_T is not None
    assert discounted.sequences[0].returns_T.tolist() == [0.25, 0.5, 1.0]
    assert prepare(make_sample(0, 1.0), make_sample(1, 0.0)).sequences[0].returns_T is None


def scored(
    samples: Sequence[Sample], columns: list[list[float]], **algorithm: object
) -> PreparedGroup:
    """After the reference's answer; `kl` makes the job need one."""
    spec = make_job(
        task={"groupSize": len(samples), "sampling": {"maxTokens": 32}},
        reference={},
        algorithm=algorithm,
    ).spec
    preparation = Preparation(spec)
    group = preparation.prepare(make_group("0-0", samples=samples))
    assert isinstance(group, PreparedGroup)
    result = preparation.with_reference(group, [np.array(column, np.float32) for column in columns])
    assert isinstance(result, PreparedGroup)
    return result


IN_LOSS: dict[str, object] = {"coefficient": 0.1}
IN_REWARD: dict[str, object] = {"coefficient": 0.5, "estimator": "k1", "placement": "reward"}


def test_the_reference_column_follows_the_sequences() -> None:
    samples = (make_sample(0, 1.0), make_sample(1, 0.0, sampled=0), make_sample(2, 0.0, sampled=2))
    group = scored(samples, [[-1.0] * 4, [-2.0] * 2], kl=IN_LOSS)
    columns = [sequence.ref_logprobs_T for sequence in group.sequences]
    assert [None if column is None else column.tolist() for column in columns] == [
        [-1] * 4,
        [-2] * 2,
    ]
    assert [sequence.advantage for sequence in group.sequences] == [1.0, -0.5]


def test_a_penalty_in_the_reward_is_the_sum_over_tokens_and_moves_the_baseline_too() -> None:
    # Sampled at -0.5; k1 = log mu - log ref: 4 x 0.5 = 2 and 2 x 0.25 = 0.5; half of it: rewards 1
    # - 1 = 0 and 0 - 0.25.
    samples = (make_sample(0, 1.0), make_sample(1, 0.0, sampled=2))
    group = scored(samples, [[-1.0] * 4, [-0.75] * 2], kl=IN_REWARD)
    assert [sequence.advantage for sequence in group.sequences] == [0.25, -0.25]
    assert group.rewards == (1.0, 0.0)


def test_a_trajectory_that_was_not_scored_has_the_mean_penalty_of_the_others() -> None:
    # Penalties 1 and 0.5, so 0.75 for the masked one: rewards 0, 3 - 0.75 = 2.25 and -0.5.
    samples = (
        make_sample(0, 1.0),
        make_sample(1, 3.0, finish=FinishReason.LENGTH),
        make_sample(2, 0.0),
    )
    settings = {"kl": IN_REWARD, "overlong": {"completions": "mask"}}
    group = scored(samples, [[-1.0] * 4, [-0.75] * 4], **settings)
    assert group.members == (0, 2)
    assert [sequence.advantage for sequence in group.sequences] == pytest.approx(
        [0 - 0.875, -0.5 - 1.125]
    )


def test_a_value_head_learns_the_penalty_of_the_tokens_from_here_on() -> None:
    group = scored(
        (make_sample(0, 1.0, sampled=3),), [[-1.0, -0.5, -1.5]], kl=IN_REWARD, baseline="value"
    )
    # Penalties 0.25, 0, 0.5.
    assert group.sequences[0].returns_T is not None
    assert group.sequences[0].returns_T.tolist() == [0.25, 0.5, 0.5]


def test_a_penalty_that_is_too_large_for_32_bits_drops_the_group() -> None:
    spec = make_job(
        task={"groupSize": 2}, reference={}, algorithm={"kl": {**IN_REWARD, "coefficient": 1e38}}
    ).spec
    preparation = Preparation(spec)
    group = preparation.prepare(make_group("0-0"))
    assert isinstance(group, PreparedGroup)
    columns = [np.full(4, -20, np.float32), np.full(4, 0, np.float32)]
    assert preparation.with_reference(group, columns) is DropReason.NON_FINITE


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (make_group("0-0", prompt_index=5), None),
        (make_group("0-0", prompt_index=6), DropReason.MISMATCH),
        (
            make_group("0-0", prompt_index=5, samples=[make_sample(i, 0.0) for i in range(3)]),
            DropReason.MISMATCH,
        ),
        (make_group("0-0", prompt_index=5, temperature=0.9), DropReason.TEMPERATURE),
        (
            make_group(
                "0-0", prompt_index=5, samples=[make_sample(0, float("inf")), make_sample(1, 0.0)]
            ),
            DropReason.NON_FINITE,
        ),
        (
            make_group(
                "0-0", prompt_index=5, samples=[make_sample(0, 0.0, logprob=float("nan"))] * 2
            ),
            DropReason.NON_FINITE,
        ),
        (make_group("0-0", prompt_index=5, version=9), DropReason.BAD_VERSION),
        (make_group("0-0", prompt_index=5, version=-1), DropReason.BAD_VERSION),
        (make_group("0-0", prompt_index=5, version=8), None),
        (
            make_group("0-0", prompt_index=5, samples=[make_sample(0, 0.0)]),
            DropReason.TOO_FEW_SAMPLES,
        ),
    ],
)
def test_faults(group: object, expected: DropReason | None) -> None:
    assert Preparation(make_job().spec).fault(group, prompt_index=5, newest_version=8) is expected  # type: ignore[arg-type]


def test_version_runs_stay_with_their_tokens() -> None:
    mixed = replace(make_sample(0, 1.0), version_runs=(VersionRun(3, 1), VersionRun(4, 3)))
    assert prepare(mixed, make_sample(1, 0.0)).sequences[0].version_runs == mixed.version_runs


def test_a_penalty_for_every_completion_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"penaltyBufferTokens=33 .*maxTokens=32"):
        make_job(algorithm={"overlong": {"penaltyBufferTokens": 33}})
