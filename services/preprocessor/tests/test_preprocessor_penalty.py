"""Penalties in the reward, by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
from preprocessor_fakes import make_sample

from pipelinerl_common.settings import OverlongSettings
from pipelinerl_preprocessor.advantage import MAX_LOG_RATIO, kl_per_token, overlong_penalty, returns


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        ((3, 6), 0.0),
        ((3, 7), -0.25),
        ((3, 9), -0.75),
        ((3, 10), -1.0),
        ((3, 12), -1.0),
        ((1, 5, 30, 8), -0.5),
        ((4,), 0.0),
    ],
)
def test_the_soft_penalty_falls_to_minus_one(segments: tuple[int, ...], expected: float) -> None:
    sample = replace(make_sample(0, 1.0), segment_lengths=segments)
    assert (
        overlong_penalty(sample, OverlongSettings(penalty_buffer_tokens=4), max_tokens=10)
        == expected
    )
    assert overlong_penalty(sample, OverlongSettings(), max_tokens=10) == 0.0


def test_nothing_sampled_is_not_too_long_even_where_every_token_is_punished() -> None:
    nothing = make_sample(0, 1.0, sampled=0)
    assert (
        overlong_penalty(nothing, OverlongSettings(penalty_buffer_tokens=10), max_tokens=10) == 0.0
    )


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # mu = 0.5; ref = 0.5, 0.25, 1: r = 0, -log 2, log 2.
        ("k1", [0.0, math.log(2), -math.log(2)]),
        ("k2", [0.0, 0.5 * math.log(2) ** 2, 0.5 * math.log(2) ** 2]),
        ("k3", [0.0, 0.5 + math.log(2) - 1, 2 - math.log(2) - 1]),
    ],
)
def test_estimators_of_the_divergence(estimator: str, expected: list[float]) -> None:
    mu, ref = (
        np.log([0.5, 0.5, 0.5]).astype(np.float32),
        np.log([0.5, 0.25, 1.0]).astype(np.float32),
    )
    np.testing.assert_allclose(kl_per_token(mu, ref, estimator), expected, atol=1e-6)


@pytest.mark.parametrize(("estimator", "sign"), [("k1", 1.0), ("k3", -1.0)])
def test_a_token_that_the_reference_hardly_knows_gives_a_bounded_penalty(
    estimator: str, sign: float
) -> None:
    (penalty,) = kl_per_token(
        np.array([0.0], np.float32), np.array([-sign * 500.0], np.float32), estimator
    )
    assert penalty == pytest.approx(
        MAX_LOG_RATIO if estimator == "k1" else math.exp(MAX_LOG_RATIO) - MAX_LOG_RATIO - 1
    )
    (other,) = kl_per_token(np.array([0.0], np.float32), np.array([500.0], np.float32), "k1")
    assert other == -20.0


@pytest.mark.parametrize(
    ("reward", "penalties", "discount", "expected"),
    [
        (1.0, [0.0, 0.5, 0.0], 1.0, [0.5, 0.5, 1.0]),
        (2.0, [0.25, 0.0, 1.0], 1.0, [0.75, 1.0, 1.0]),
        # 1 at the end; 0.5 of it less 0.5 before; 0.5 of that less 0.
        (1.0, [0.0, 0.5, 0.0], 0.5, [0.0, 0.0, 1.0]),
        (1.0, [0.0, 0.0, 0.0], 0.5, [0.25, 0.5, 1.0]),
        (3.0, [1.0], 0.5, [2.0]),
        (3.0, [], 1.0, []),
    ],
)
def test_returns_are_discounted_sums_of_what_follows(
    reward: float, penalties: list[float], discount: float, expected: list[float]
) -> None:
    np.testing.assert_allclose(returns(reward, np.array(penalties), discount), expected, atol=1e-12)
