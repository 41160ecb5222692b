"""Advantages by hand."""

import numpy as np
import pytest
from preprocessor_fakes import make_job

from pipelinerl_common.settings import AlgorithmSettings
from pipelinerl_preprocessor.advantage import BASELINES, STD_EPS, advantages, deviation


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        # The others' means are 1/3, 1/3, 1/3 and 1.
        ("leave_one_out", [1, 0, 1, 0], [2 / 3, -2 / 3, 2 / 3, -2 / 3]),
        ("leave_one_out", [3, 0, 0], [3, -1.5, -1.5]),
        ("leave_one_out", [0.25, 0.25], [0, 0]),
        ("mean", [1, 0, 1, 0], [0.5, -0.5, 0.5, -0.5]),
        ("mean", [3, 0, 0], [2, -1, -1]),
        ("none", [1, 0, -2], [1, 0, -2]),
        ("value", [1, 0, -2], [1, 0, -2]),
    ],
)
def test_baselines(name: str, rewards: list[float], expected: list[float]) -> None:
    found = BASELINES[name].advantages(np.array(rewards, dtype=np.float64))
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_the_leave_one_out_baseline_is_the_mean_of_the_others() -> None:
    rewards = np.random.default_rng(0).normal(size=7)
    others = [rewards[i] - np.delete(rewards, i).mean() for i in range(7)]
    np.testing.assert_allclose(BASELINES["leave_one_out"].advantages(rewards), others, atol=1e-12)


def test_a_baseline_of_the_group_needs_a_second_trajectory() -> None:
    assert {name: baseline.min_samples for name, baseline in BASELINES.items()} == {
        "leave_one_out": 2,
        "mean": 2,
        "none": 1,
        "value": 1,
    }


def test_the_deviation_is_that_of_a_sample() -> None:
    # Mean 1, squares 4 + 1 + 1 over 3 - 1.
    assert deviation(np.array([3.0, 0.0, 0.0])) == pytest.approx(3**0.5)


@pytest.mark.parametrize(
    ("settings", "rewards", "expected"),
    [
        ({"loss": "reinforce"}, [3, 0, 0], [3, -1.5, -1.5]),
        ({"loss": "reinforce", "baseline": "none"}, [3, 0, 0], [3, 0, 0]),
        ({"loss": "ppo"}, [3, 0, 0], [3, 0, 0]),
        ({"loss": "rloo"}, [3, 0, 0], [3, -1.5, -1.5]),
        ({"loss": "dr_grpo"}, [3, 0, 0], [2, -1, -1]),
        (
            {"loss": "grpo"},
            [3, 0, 0],
            [2 / (3**0.5 + 1e-6), -1 / (3**0.5 + 1e-6), -1 / (3**0.5 + 1e-6)],
        ),
        ({"loss": "grpo"}, [5, 5, 5], [0, 0, 0]),
        ({"loss": "grpo", "divideByStd": False}, [3, 0, 0], [2, -1, -1]),
        ({"loss": "dapo"}, [1, 0], [0.5 / (0.5**0.5 + 1e-6), -0.5 / (0.5**0.5 + 1e-6)]),
        ({"loss": "gspo"}, [1, 0], [0.5 / (0.5**0.5 + 1e-6), -0.5 / (0.5**0.5 + 1e-6)]),
        ({"loss": "cispo"}, [1, 0], [0.5 / (0.5**0.5 + 1e-6), -0.5 / (0.5**0.5 + 1e-6)]),
        (
            {"baseline": "leave_one_out", "divideByStd": True},
            [1, 0],
            [1 / (0.5**0.5 + 1e-6), -1 / (0.5**0.5 + 1e-6)],
        ),
    ],
)
def test_the_job_chooses_baseline_and_scale(
    settings: dict[str, object], rewards: list[float], expected: list[float]
) -> None:
    algorithm = AlgorithmSettings.model_validate(settings)
    np.testing.assert_allclose(
        advantages(np.array(rewards, dtype=np.float64), algorithm), expected, rtol=1e-12, atol=1e-12
    )


def test_rewards_that_differ_by_rounding_alone_do_not_get_advantages_of_order_one() -> None:
    rewards = np.array([1.0, 1.0 + 1e-9])
    assert STD_EPS == 1e-6
    assert np.abs(advantages(rewards, AlgorithmSettings(loss="grpo"))).max() < 1e-3


def test_a_job_is_parsed_with_its_algorithm() -> None:
    assert make_job(algorithm={"loss": "grpo"}).spec.algorithm.divide_by_std
