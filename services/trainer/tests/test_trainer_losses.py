"""Losses against numbers worked out by hand."""

import math

import pytest
import torch
import trainer_toys as toys
from torch import Tensor

from pipelinerl_common.errors import FatalError
from pipelinerl_trainer.losses import MAX_LOG_RATIO, POLICY_LOSSES, kl_to_reference, value_loss
from pipelinerl_trainer.objective import Objective
from pipelinerl_trainer.packed import TokenColumns
from pipelinerl_trainer.scoring import TokenScores


def column(*values: float, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def log_of(*ratios: float, grad: bool = False) -> Tensor:
    return column(*(math.log(ratio) for ratio in ratios), grad=grad)


def gradient(loss: Tensor, of: Tensor) -> list[float]:
    values: list[float] = torch.autograd.grad(loss.sum(), of)[0].tolist()
    return values


def test_reinforce_is_minus_truncated_weight_times_advantage_times_logprob() -> None:
    # pi = 0.5, 0.9, 0.5; mu = 0.25, 0.1, 0.5: w = 2, 9, 1; c = 5 truncates the second.
    logprobs = log_of(0.5, 0.9, 0.5, grad=True)
    loss = POLICY_LOSSES["reinforce"](logprobs, log_of(0.25, 0.1, 0.5), column(1.5, 1.0, -2.0), toys.algorithm(truncation=5))
    assert loss.loss_T.tolist() == pytest.approx([-2 * 1.5 * math.log(0.5), -5 * math.log(0.9), 2 * math.log(0.5)])
    assert loss.weights_T.tolist() == pytest.approx([2, 9, 1])
    assert loss.effective_weights_T.tolist() == pytest.approx([2, 5, 1])
    assert loss.clipped_T.tolist() == [False, True, False]
    # d/dlogp of -w A logp with w held fixed: a positive advantage makes the token more likely.
    assert gradient(loss.loss_T, logprobs) == pytest.approx([-3.0, -5.0, 2.0])


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_clipped_ratio_stops_only_moves_beyond_its_bounds(name: str) -> None:
    # w = 1.5 (A > 0: clipped at 1.3), 1.5 (A < 0: not), 0.5 (A < 0: clipped at 0.9), 0.5 (A > 0: not), 1.
    ratios = (1.5, 1.5, 0.5, 0.5, 1.0)
    logprobs = log_of(*(0.4 * ratio for ratio in ratios), grad=True)
    advantages = column(1.0, -1.0, -1.0, 1.0, 3.0)
    settings = toys.algorithm(loss=name, clipLow=0.1, clipHigh=0.3)
    loss = POLICY_LOSSES[name](logprobs, log_of(*[0.4] * 5), advantages, settings)
    assert loss.loss_T.tolist() == pytest.approx([-1.3, 1.5, 0.9, -0.5, -3.0])
    assert loss.clipped_T.tolist() == [True, False, True, False, False]
    assert loss.effective_weights_T.tolist() == pytest.approx([1.3, 1.3, 0.9, 0.9, 1.0])
    # d(-w A)/dlogp = -w A where the ratio is not clipped, 0 where it is.
    assert gradient(loss.loss_T, logprobs) == pytest.approx([0.0, 1.5, 0.0, -0.5, -3.0])


def test_a_token_of_a_very_different_policy_gives_a_finite_weight() -> None:
    loss = POLICY_LOSSES["reinforce"](column(-1.0), column(-200.0), column(1.0), toys.algorithm(truncation=5))
    assert loss.weights_T.tolist() == pytest.approx([math.exp(MAX_LOG_RATIO)])
    assert loss.loss_T.tolist() == pytest.approx([5.0])


def test_k3_is_zero_where_equal_and_pulls_towards_the_reference() -> None:
    logprobs = log_of(0.5, 0.5, 0.5, grad=True)
    kl = kl_to_reference(logprobs, log_of(0.5, 0.25, 1.0))
    # r = log(ref / pi) = 0, log 0.5, log 2: exp(r) - r - 1.
    assert kl.tolist() == pytest.approx([0.0, 0.5 + math.log(2) - 1, 2 - math.log(2) - 1])
    # d/dlogp = 1 - exp(r): a token that the policy likes more than the reference does (r < 0) is pushed down.
    assert gradient(kl, logprobs) == pytest.approx([0.0, 0.5, -1.0])


def test_value_loss_is_half_the_squared_error() -> None:
    values = column(2.0, -1.0, grad=True)
    loss = value_loss(values, column(0.5, 1.0))
    assert loss.tolist() == pytest.approx([1.125, 2.0])
    assert gradient(loss, values) == pytest.approx([1.5, -2.0])


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
)


def test_the_objective_adds_its_terms_with_their_signs_and_sequence_weights() -> None:
    settings = toys.algorithm(entropyCoefficient=0.1).model_copy(
        update={"kl": toys.algorithm().kl.model_copy(update={"coefficient": 0.2})}
    )
    row = Objective(settings)(scores(), COLUMNS)
    k3 = 2 - math.log(2) - 1
    first = -math.log(0.5) - 0.1 * 1.0
    second = math.log(0.25) + 0.2 * k3 - 0.1 * 3.0
    assert row.total.item() == pytest.approx(first + 0.5 * second)


def test_the_entropy_bonus_rewards_entropy() -> None:
    given = scores()
    total = Objective(toys.algorithm(entropyCoefficient=0.1))(given, COLUMNS).total
    assert gradient(total, given.entropy_T) == pytest.approx([-0.1, -0.05])


def test_with_a_value_head_the_advantage_is_return_minus_value_and_does_not_train_the_head() -> None:
    given = scores(values=True)
    row = Objective(toys.algorithm(baseline="value", valueCoefficient=0.1))(given, COLUMNS)
    policy = -(1.0 - 0.5) * math.log(0.5) - 0.5 * 2.0 * math.log(0.25)
    value = 0.1 * (0.5 * 0.25 + 0.5 * 0.5 * 4.0)
    assert row.total.item() == pytest.approx(policy + value)
    assert given.values_T is not None
    # Only the squared error reaches the head: coefficient * weight * (v - R).
    assert gradient(row.total, given.values_T) == pytest.approx([0.1 * -0.5, 0.1 * 0.5 * -2.0])


def test_a_row_without_a_needed_column_is_an_error_and_never_silently_zero() -> None:
    settings = toys.algorithm().model_copy(update={"kl": toys.algorithm().kl.model_copy(update={"coefficient": 0.2})})
    without = TokenColumns(COLUMNS.old_logprobs_T, COLUMNS.advantages_T, None, None, COLUMNS.weights_T)
    with pytest.raises(FatalError, match="ref_logprobs"):
        Objective(settings)(scores(), without)
    with pytest.raises(FatalError, match="returns"):
        Objective(toys.algorithm(baseline="value"))(scores(values=True), without)


def test_the_normalizer_counts_the_whole_step() -> None:
    plan = toys.plan_of(toys.trajectories(5))
    assert Objective(toys.algorithm()).normalizer(plan) == 5
    assert Objective(toys.algorithm(normalizeBy="tokens")).normalizer(plan) == plan.num_trained_tokens
