"""Importance weights, surrogates, KL estimators and advantages of a value head against numbers
worked out by hand.
"""

import math

import pytest
import torch
import trainer_fakes as fakes
from torch import Tensor

from pipelinerl_common.settings import AlgorithmSettings
from pipelinerl_trainer.losses import (
    IMPORTANCE,
    KL_ESTIMATORS,
    MAX_LOG_RATIO,
    SURROGATES,
    PolicyLoss,
    kl_to_reference,
    lengths_per_sequence,
    mixed,
    sums_per_sequence,
    value_loss,
)
from pipelinerl_trainer.objective import generalized_advantages


def column(*values: float, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def log_of(*ratios: float, grad: bool = False) -> Tensor:
    return column(*(math.log(ratio) for ratio in ratios), grad=grad)


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def gradient(loss: Tensor, of: Tensor) -> list[float]:
    values: list[float] = torch.autograd.grad(loss.sum(), of)[0].tolist()
    return values


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Ratios 3, 0.75 | 8 | 0.5, 2, 8: products 2.25, 8, 8; roots 1.5, 8, 2.
        ("token", [3, 0.75, 8, 0.5, 2, 8]),
        ("sequence", [2.25, 2.25, 8, 8, 8, 8]),
        ("geometric", [1.5, 1.5, 8, 2, 2, 2]),
        ("none", [1, 1, 1, 1, 1, 1]),
    ],
)
def test_importance_weights_of_tokens_and_of_sequences(name: str, expected: list[float]) -> None:
    weights = IMPORTANCE[name](log_of(3, 0.75, 8, 0.5, 2, 8), numbers(0, 0, 1, 2, 2, 2))
    assert weights.tolist() == pytest.approx(expected)


def test_a_sequence_without_trained_tokens_between_others_shifts_nothing() -> None:
    weights = IMPORTANCE["geometric"](log_of(3, 0.75, 0.5, 2), numbers(0, 0, 2, 2))
    assert weights.tolist() == pytest.approx([1.5, 1.5, 1, 1])
    assert sums_per_sequence(column(1, 2, 3), numbers(0, 0, 2)).tolist() == [3, 3, 3]
    assert lengths_per_sequence(numbers(0, 0, 3), torch.float32).tolist() == [2, 2, 1]


@pytest.mark.parametrize("name", IMPORTANCE)
def test_a_row_without_trained_tokens_has_no_weights(name: str) -> None:
    assert IMPORTANCE[name](column(), numbers()).tolist() == []


@pytest.mark.parametrize(
    ("name", "log_ratios"),
    [("token", [199.0]), ("sequence", [120.0, 79.0]), ("geometric", [199.0])],
)
def test_a_token_of_a_very_different_policy_gives_a_finite_weight(
    name: str, log_ratios: list[float]
) -> None:
    weights = IMPORTANCE[name](column(*log_ratios), numbers(*[0] * len(log_ratios)))
    assert MAX_LOG_RATIO == 20
    assert weights.tolist() == pytest.approx([math.exp(20)] * len(log_ratios))
    low = IMPORTANCE[name](-column(*log_ratios), numbers(*[0] * len(log_ratios)))
    assert low.tolist() == pytest.approx([math.exp(-20)] * len(log_ratios))


def score(weights: Tensor, logprobs: Tensor, advantages: Tensor, **options: object) -> PolicyLoss:
    return SURROGATES["score"](logprobs, weights, advantages, fakes.algorithm(**options))


def test_reinforce_is_minus_truncated_weight_times_advantage_times_logprob() -> None:
    # w = 2, 9, 1; c = 5 truncates the second.
    logprobs = log_of(0.5, 0.9, 0.5, grad=True)
    loss = score(column(2, 9, 1), logprobs, column(1.5, 1.0, -2.0), truncation=5)
    assert loss.loss_T.tolist() == pytest.approx(
        [-2 * 1.5 * math.log(0.5), -5 * math.log(0.9), 2 * math.log(0.5)]
    )
    assert loss.effective_weights_T.tolist() == pytest.approx([2, 5, 1])
    assert loss.clipped_T.tolist() == [False, True, False]
    # d/dlogp of -w A logp with w held fixed: a positive advantage makes the token more likely.
    assert gradient(loss.loss_T, logprobs) == pytest.approx([-3.0, -5.0, 2.0])


@pytest.mark.parametrize(
    ("options", "expected", "clipped"),
    [
        # Weights 0.25, 0.5, 1, 2, 8; a weight on a bound is inside.
        (
            {"truncation": 2, "truncationLow": 0.5},
            [0.5, 0.5, 1, 2, 2],
            [True, False, False, False, True],
        ),
        (
            {"truncation": 2, "truncationLow": 0.5, "outside": "mask"},
            [0, 0.5, 1, 2, 0],
            [True, False, False, False, True],
        ),
        (
            {"truncation": 2, "outside": "mask"},
            [0.25, 0.5, 1, 2, 0],
            [False, False, False, False, True],
        ),
        (
            {"truncation": 0, "truncationLow": 0.5},
            [0.5, 0.5, 1, 2, 8],
            [True, False, False, False, False],
        ),
        ({"truncation": 0}, [0.25, 0.5, 1, 2, 8], [False] * 5),
    ],
)
def test_weights_beyond_their_bounds_are_truncated_or_masked(
    options: dict[str, object], expected: list[float], clipped: list[bool]
) -> None:
    logprobs = column(-1, -1, -1, -1, -1, grad=True)
    loss = score(column(0.25, 0.5, 1, 2, 8), logprobs, column(1, 1, 1, 1, -1), **options)
    assert loss.effective_weights_T.tolist() == pytest.approx(expected)
    assert loss.clipped_T.tolist() == clipped
    assert gradient(loss.loss_T, logprobs) == pytest.approx(
        [*(-weight for weight in expected[:4]), expected[4]]
    )


def test_mixing_averages_the_weight_with_one() -> None:
    # (1 + 0.25 w) / 1.25
    assert mixed(column(1, 0, 6), 0.25).tolist() == pytest.approx([1, 0.8, 2])
    loss = score(
        column(1, 0.5, 9),
        log_of(0.5, 0.5, 0.5),
        column(1, 1, 1),
        truncation=6,
        experimental={"gradientMixing": 0.25},
    )
    assert loss.effective_weights_T.tolist() == pytest.approx([1, 0.9, 2])
    assert loss.loss_T.tolist() == pytest.approx([math.log(2), 0.9 * math.log(2), 2 * math.log(2)])


def clip(weights: Tensor, logprobs: Tensor, advantages: Tensor, **options: object) -> PolicyLoss:
    return SURROGATES["clip"](logprobs, weights, advantages, fakes.algorithm(loss="ppo", **options))


def test_clipped_ratio_stops_only_moves_beyond_its_bounds() -> None:
    # w = 1.5 (A > 0: clipped at 1.3), 1.5 (A < 0: not), 0.5 (A < 0: clipped at 0.9), 0.5 (A > 0:
    # not), 1.
    logprobs = log_of(0.6, 0.6, 0.2, 0.2, 0.4, grad=True)
    advantages = column(1.0, -1.0, -1.0, 1.0, 3.0)
    loss = clip(column(1.5, 1.5, 0.5, 0.5, 1.0), logprobs, advantages, clipLow=0.1, clipHigh=0.3)
    assert loss.loss_T.tolist() == pytest.approx([-1.3, 1.5, 0.9, -0.5, -3.0])
    assert loss.clipped_T.tolist() == [True, False, True, False, False]
    assert loss.effective_weights_T.tolist() == pytest.approx([1.3, 1.3, 0.9, 0.9, 1.0])
    # d(-w A)/dlogp = -w A where the ratio is not clipped, 0 where it is.
    assert gradient(loss.loss_T, logprobs) == pytest.approx([0.0, 1.5, 0.0, -0.5, -3.0])


def test_a_ratio_on_its_bound_or_without_an_advantage_is_not_clipped() -> None:
    logprobs = column(-1, -1, -1, -1, grad=True)
    loss = clip(
        column(1.25, 0.75, 2, 0.5), logprobs, column(1, -1, 0, 0), clipLow=0.25, clipHigh=0.25
    )
    assert loss.clipped_T.tolist() == [False] * 4
    assert loss.loss_T.tolist() == pytest.approx([-1.25, 0.75, 0, 0])


@pytest.mark.parametrize(
    ("estimator", "values", "slopes"),
    [
        # pi = 0.5; ref = 0.5, 0.25, 1: r = log(ref / pi) = 0, -log 2, log 2.
        ("k1", [0, math.log(2), -math.log(2)], [1, 1, 1]),
        ("k2", [0, math.log(2) ** 2 / 2, math.log(2) ** 2 / 2], [0, math.log(2), -math.log(2)]),
        # d/dlogp = 1 - exp(r): a token that the policy likes more than the reference does (r < 0)
        # is pushed down.
        ("k3", [0, 0.5 + math.log(2) - 1, 2 - math.log(2) - 1], [0, 0.5, -1]),
    ],
)
def test_estimators_of_the_divergence_from_the_reference(
    estimator: str, values: list[float], slopes: list[float]
) -> None:
    logprobs = log_of(0.5, 0.5, 0.5, grad=True)
    kl = kl_to_reference(logprobs, log_of(0.5, 0.25, 1.0), estimator)
    assert kl.tolist() == pytest.approx(values)
    assert gradient(kl, logprobs) == pytest.approx(slopes)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_a_token_that_the_reference_hardly_knows_gives_a_finite_divergence(estimator: str) -> None:
    expected = {"k1": (20, -20), "k2": (200, 200), "k3": (math.exp(-20) + 19, math.exp(20) - 21)}[
        estimator
    ]
    assert kl_to_reference(column(0, -500), column(-500, 0), estimator).tolist() == pytest.approx(
        expected
    )


def test_value_loss_is_half_the_squared_error() -> None:
    values = column(2.0, -1.0, grad=True)
    loss = value_loss(values, column(0.5, 1.0))
    assert loss.tolist() == pytest.approx([1.125, 2.0])
    assert gradient(loss, values) == pytest.approx([1.5, -2.0])


@pytest.mark.parametrize(
    ("discount", "gae_lambda", "expected"),
    [
        # Two sequences, 3 tokens and 1. Returns 1 1 1 | 2, values 0.5 0.25 0.75 | 1.5.
        # lambda 1: return minus value.
        (1.0, 1.0, [0.5, 0.75, 0.25, 0.5]),
        # lambda 0: r + v' - v with r = 0 0 1 | 2: 0.25 - 0.5, 0.75 - 0.25, 1 - 0.75 | 2 - 1.5.
        (1.0, 0.0, [-0.25, 0.5, 0.25, 0.5]),
        # lambda 0.5: 0.25; 0.5 + 0.5 * 0.25; -0.25 + 0.5 * 0.625.
        (1.0, 0.5, [0.0625, 0.625, 0.25, 0.5]),
        # discount 0.5, rewards R - 0.5 R' = 0.5 0.5 1 | 2. deltas 0.5 + 0.125 - 0.5, 0.5 + 0.375 -
        # 0.25, 0.25 | 0.5;
        # discount lambda = 0.25: 0.625 + 0.0625 = 0.6875; 0.125 + 0.171875.
        (0.5, 0.5, [0.296875, 0.6875, 0.25, 0.5]),
        (0.5, 1.0, [0.5, 0.75, 0.25, 0.5]),
    ],
)
def test_generalized_advantages(discount: float, gae_lambda: float, expected: list[float]) -> None:
    returns, values = column(1, 1, 1, 2), column(0.5, 0.25, 0.75, 1.5)
    found = generalized_advantages(
        returns, values, numbers(0, 0, 0, 1), discount=discount, gae_lambda=gae_lambda
    )
    assert found.tolist() == pytest.approx(expected)


def test_each_sequence_has_advantages_of_its_own() -> None:
    # Errors 1 2 | 3 5: deltas -1 2 | -2 5; with lambda 0.5: 0 2 | 0.5 5.
    found = generalized_advantages(
        column(1, 2, 3, 5), column(0, 0, 0, 0), numbers(1, 1, 4, 4), discount=1.0, gae_lambda=0.5
    )
    assert found.tolist() == pytest.approx([0, 2, 0.5, 5])


def test_return_minus_value_is_exact_to_the_last_bit() -> None:
    returns, values = column(0.1, 0.7), column(0.0, 0.0)
    assert (0.1 - 0.7) + 0.7 != 0.1  # what the sum of deltas would give
    found = generalized_advantages(returns, values, numbers(0, 0), discount=1.0, gae_lambda=1.0)
    assert found.tolist() == (returns - values).tolist()


@pytest.mark.parametrize("gae_lambda", [0.5, 1.0])
def test_a_row_without_trained_tokens_has_no_advantages(gae_lambda: float) -> None:
    assert (
        generalized_advantages(
            column(), column(), numbers(), discount=1.0, gae_lambda=gae_lambda
        ).tolist()
        == []
    )


def test_surrogates_and_importance_weights_are_those_that_settings_can_name() -> None:
    fields = AlgorithmSettings.model_fields
    for table, name in ((SURROGATES, "surrogate"), (IMPORTANCE, "importance")):
        assert set(table) == set(fields[name].annotation.__args__)  # type: ignore[union-attr]
