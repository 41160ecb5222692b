"""The loss of a row and of a step against numbers worked out by hand."""

import dataclasses
import math

import pytest
import torch
import trainer_fakes as fakes
from test_trainer_losses import column, gradient, log_of, numbers

from pipelinerl_common.errors import FatalError
from pipelinerl_common.settings import AlgorithmSettings
from pipelinerl_trainer.objective import NORMALIZATIONS, Objective
from pipelinerl_trainer.packed import TokenColumns
from pipelinerl_trainer.scoring import TokenScores


def objective(settings: AlgorithmSettings) -> Objective:
    return Objective(settings, max_tokens=10)


def scores(*, values: bool = False) -> TokenScores:
    return TokenScores(
        logprobs_T=log_of(0.5, 0.25, grad=True),
        entropy_T=column(1.0, 3.0, grad=True),
        values_T=column(0.5, 0.0, grad=True) if values else None,
    )


COLUMNS = TokenColumns(
    old_logprobs_T=log_of(0.5, 0.25),
    advantages_T=column(1.0, -1.0),
    ref_logprobs_T=log_of(0.5, 0.5),
    returns_T=column(1.0, 2.0),
    weights_T=column(1.0, 0.5),
    sequence_T=numbers(0, 1),
)


def test_the_objective_adds_its_terms_with_their_signs_and_sequence_weights() -> None:
    settings = fakes.full_algorithm(entropyCoefficient=0.1, kl={"coefficient": 0.2})
    row = objective(settings)(scores(), COLUMNS)
    k3 = 2 - math.log(2) - 1
    first = -math.log(0.5) - 0.1 * 1.0
    second = math.log(0.25) + 0.2 * k3 - 0.1 * 3.0
    assert row.total.item() == pytest.approx(first + 0.5 * second)
    assert row.kl_T is not None
    assert row.kl_T.tolist() == pytest.approx([0, k3])
    assert row.entropy_T.tolist() == [1.0, 3.0]
    assert row.value_error_T is None


def test_a_penalty_in_the_reward_is_measured_and_not_added_again() -> None:
    settings = fakes.full_algorithm(
        entropyCoefficient=0, kl={"coefficient": 0.2, "estimator": "k1", "placement": "reward"}
    )
    row = objective(settings)(scores(), COLUMNS)
    assert row.total.item() == pytest.approx(-math.log(0.5) + 0.5 * math.log(0.25))
    assert row.kl_T is not None
    assert row.kl_T.tolist() == pytest.approx([0, -math.log(2)])


def test_without_a_bonus_an_entropy_that_is_not_a_number_spoils_nothing() -> None:
    given = TokenScores(log_of(0.5, 0.25, grad=True), column(float("nan"), 1.0), None)
    assert math.isfinite(objective(fakes.algorithm())(given, COLUMNS).total.item())


def test_what_goes_to_the_metrics_has_no_gradient() -> None:
    row = objective(fakes.full_algorithm(baseline="value"))(scores(values=True), COLUMNS)
    measured = [row.kl_T, row.entropy_T, row.value_error_T, row.ratios_T]
    measured += [row.policy.effective_weights_T, row.policy.clipped_T]
    assert [None if each is None else each.requires_grad for each in measured] == [False] * 6
    assert row.total.requires_grad


def test_the_entropy_bonus_rewards_entropy() -> None:
    given = scores()
    bonus = objective(fakes.algorithm(entropyCoefficient=0.1))
    assert bonus.needs_entropy_gradient
    assert not objective(fakes.algorithm()).needs_entropy_gradient
    assert gradient(bonus(given, COLUMNS).total, given.entropy_T) == pytest.approx([-0.1, -0.05])


def test_with_a_value_head_the_advantage_is_return_minus_value_and_does_not_train_the_head() -> (
    None
):
    given = scores(values=True)
    row = objective(fakes.algorithm(baseline="value", valueCoefficient=0.1))(given, COLUMNS)
    policy = -(1.0 - 0.5) * math.log(0.5) - 0.5 * 2.0 * math.log(0.25)
    value = 0.1 * (0.5 * 0.25 + 0.5 * 0.5 * 4.0)
    assert row.total.item() == pytest.approx(policy + value)
    assert given.values_T is not None
    # Only the squared error reaches the head: coefficient * weight * (v - R).
    assert gradient(row.total, given.values_T) == pytest.approx([0.1 * -0.5, 0.1 * 0.5 * -2.0])
    assert row.value_error_T is not None
    assert row.value_error_T.tolist() == pytest.approx([0.125, 2.0])


def test_the_value_head_s_discount_and_lambda_are_those_of_the_job() -> None:
    settings = fakes.algorithm(baseline="value", gaeLambda=0.5, discount=0.8, valueCoefficient=0.1)
    one_sequence = dataclasses.replace(COLUMNS, sequence_T=numbers(0, 0))
    given = scores(values=True)
    row = objective(settings)(given, one_sequence)
    # Errors 0.5 and 2; deltas 0.5 - 0.8 * 2 = -1.1 and 2; advantages -1.1 + 0.4 * 2 = -0.3 and 2.
    assert gradient(row.policy.loss_T, given.logprobs_T) == pytest.approx([0.3, -2.0])


def test_a_row_without_a_needed_column_is_an_error_and_never_silently_zero() -> None:
    without = TokenColumns(
        COLUMNS.old_logprobs_T,
        COLUMNS.advantages_T,
        None,
        None,
        COLUMNS.weights_T,
        COLUMNS.sequence_T,
    )
    with pytest.raises(FatalError, match="ref_logprobs"):
        objective(fakes.full_algorithm())(scores(), without)
    with pytest.raises(FatalError, match="returns"):
        objective(fakes.algorithm(baseline="value"))(scores(values=True), without)


@pytest.mark.parametrize(
    ("normalize_by", "weights", "divisor"),
    [
        ("sequences", [1, 1, 1], 5),
        ("tokens", [1, 1, 1], 26),
        ("sequence_means", [0.5, 0.5, 1], 5),
        ("max_tokens", [1, 1, 1], 50),
    ],
)
def test_the_normalizer_counts_the_whole_step(
    normalize_by: str, weights: list[float], divisor: float
) -> None:
    plan = fakes.plan_of(fakes.trajectories(5))
    assert (plan.num_sequences, plan.num_trained_tokens) == (5, 26)
    assert objective(fakes.algorithm(normalizeBy=normalize_by)).normalizer(plan) == divisor
    assert NORMALIZATIONS[normalize_by].weights_T(numbers(0, 0, 1)).tolist() == weights
    assert NORMALIZATIONS[normalize_by].weights_T(numbers()).tolist() == []


def test_a_step_without_anything_to_train_is_divided_by_one() -> None:
    assert objective(fakes.algorithm(normalizeBy="tokens")).normalizer(fakes.plan_of([])) == 1.0


# Two sequences, of two tokens and of one. pi = 0.6 0.3 | 0.8, mu = 0.2 0.4 | 0.1: w = 3 0.75 | 8,
# products 2.25 | 8, geometric
# means 1.5 | 8. Advantages 1 | -2.
A, B, C = math.log(0.6), math.log(0.3), math.log(0.8)


@pytest.mark.parametrize(
    ("name", "loss", "slopes"),
    [
        # c = 5 truncates the last weight.
        ("reinforce", (-3 * A - 0.75 * B + 2 * 5 * C) / 2, [-3 / 2, -0.75 / 2, 10 / 2]),
        # The first is clipped at 1.2; a negative advantage is not clipped from above.
        ("ppo", (-1.2 - 0.75 + 16) / 3, [0, -0.75 / 3, 16 / 3]),
        ("grpo", ((-1.2 - 0.75) / 2 + 16) / 2, [0, -0.75 / 4, 16 / 2]),
        ("dr_grpo", (-1.2 - 0.75 + 16) / 20, [0, -0.75 / 20, 16 / 20]),
        ("dapo", (-1.28 - 0.75 + 16) / 3, [0, -0.75 / 3, 16 / 3]),
        # Both tokens of the first sequence have 1.5, which is clipped at 1.0004.
        ("gspo", (-1.0004 + 16) / 2, [0, 0, 16 / 2]),
        ("cispo", (-3 * A - 0.75 * B + 2 * 5 * C) / 3, [-1, -0.25, 10 / 3]),
        ("rloo", (-2.25 * A - 2.25 * B + 2 * 5 * C) / 2, [-2.25 / 2, -2.25 / 2, 10 / 2]),
    ],
)
def test_every_named_algorithm(name: str, loss: float, slopes: list[float]) -> None:
    logprobs = column(A, B, C, grad=True)
    columns = TokenColumns(
        old_logprobs_T=log_of(0.2, 0.4, 0.1),
        advantages_T=column(1, 1, -2),
        ref_logprobs_T=None,
        returns_T=None,
        weights_T=column(1, 1, 1),
        sequence_T=numbers(0, 0, 1),
    )
    # PPO's value head is another test's: here its advantages come with the batch.
    options = {"baseline": "leave_one_out"} if name == "ppo" else {}
    row = objective(fakes.algorithm(loss=name, **options))(
        TokenScores(logprobs, torch.zeros(3), None), columns
    )
    divisor = {"sequences": 2, "sequence_means": 2, "tokens": 3, "max_tokens": 2 * 10}[
        fakes.algorithm(loss=name).normalize_by
    ]
    assert row.total.item() / divisor == pytest.approx(loss)
    assert [slope / divisor for slope in gradient(row.total, logprobs)] == pytest.approx(slopes)
    assert row.ratios_T.tolist() == pytest.approx([3, 0.75, 8])


def test_gspo_moves_all_tokens_of_a_sequence_that_is_within_its_bounds() -> None:
    # Ratios 1.25 and 0.8: geometric mean 1, not clipped; d(s A)/dlogp of each token is s A / 2.
    logprobs = log_of(0.5, 0.4, grad=True)
    columns = TokenColumns(log_of(0.4, 0.5), column(3, 3), None, None, column(1, 1), numbers(0, 0))
    row = objective(fakes.algorithm(loss="gspo"))(
        TokenScores(logprobs, torch.zeros(2), None), columns
    )
    assert row.total.item() == pytest.approx(-3)
    assert gradient(row.total, logprobs) == pytest.approx([-1.5, -1.5])
