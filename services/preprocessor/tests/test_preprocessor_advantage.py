"""Advantages by hand."""

import numpy as np
import pytest
from preprocessor_harness import make_job

from pipelinerl_common.errors import SettingsError
from pipelinerl_preprocessor.advantage import ESTIMATORS, estimator_of


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        # The others' means are 1/3, 1/3, 1/3 and 1.
        ("leave_one_out", [1, 0, 1, 0], [2 / 3, -2 / 3, 2 / 3, -2 / 3]),
        ("leave_one_out", [3, 0, 0], [3, -1.5, -1.5]),
        ("leave_one_out", [0.25, 0.25], [0, 0]),
        ("value", [1, 0, -2], [1, 0, -2]),
        # Mean 1, sample variance (4 + 1 + 1) / 2 = 3.
        ("grpo", [3, 0, 0], [2 / (3**0.5 + 1e-6), -1 / (3**0.5 + 1e-6), -1 / (3**0.5 + 1e-6)]),
        ("grpo", [5, 5, 5], [0, 0, 0]),
    ],
)
def test_estimators(name: str, rewards: list[float], expected: list[float]) -> None:
    advantages = ESTIMATORS[name].advantages(np.array(rewards, dtype=np.float64))
    np.testing.assert_allclose(advantages, expected, rtol=1e-12, atol=1e-12)


def test_the_leave_one_out_baseline_is_the_mean_of_the_others() -> None:
    rewards = np.random.default_rng(0).normal(size=7)
    others = [rewards[i] - np.delete(rewards, i).mean() for i in range(7)]
    np.testing.assert_allclose(ESTIMATORS["leave_one_out"].advantages(rewards), others, atol=1e-12)


@pytest.mark.parametrize(
    ("loss", "baseline", "name"),
    [
        ("reinforce", "leave_one_out", "leave_one_out"),
        ("reinforce", "value", "value"),
        ("ppo", "value", "value"),
        ("grpo", "leave_one_out", "grpo"),
    ],
)
def test_the_job_chooses_the_estimator(loss: str, baseline: str, name: str) -> None:
    spec = make_job(algorithm={"loss": loss, "baseline": baseline}).spec
    assert estimator_of(spec.algorithm) is ESTIMATORS[name]


def test_grpo_with_a_value_head_is_refused() -> None:
    with pytest.raises(SettingsError, match="baseline=value"):
        make_job(algorithm={"loss": "grpo", "baseline": "value"})
