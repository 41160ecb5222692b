"""Step metrics against numbers worked out by hand, and their reduction over ranks."""

import dataclasses
import math

import pytest
import torch
import trainer_fakes as fakes

from pipelinerl_common.types import VersionRun
from pipelinerl_trainer.losses import PolicyLoss
from pipelinerl_trainer.metrics import (
    EffectiveSampleSize,
    LagHistogram,
    Maximum,
    Mean,
    StepMetrics,
    Total,
)
from pipelinerl_trainer.objective import RowLoss


def row_loss(
    weights: list[float], effective: list[float], *, kl: list[float] | None = None
) -> RowLoss:
    weights_T, effective_T = torch.tensor(weights), torch.tensor(effective)
    policy = PolicyLoss(torch.zeros_like(weights_T), effective_T, weights_T != effective_T)
    kl_T = None if kl is None else torch.tensor(kl)
    return RowLoss(
        torch.tensor(0.0), policy, weights_T, kl_T, torch.full_like(weights_T, 0.5), None
    )


def test_effective_sample_size_is_one_for_equal_weights_and_falls_with_their_spread() -> None:
    even, uneven = EffectiveSampleSize(), EffectiveSampleSize()
    even.add(sum_w=6.0, sum_w2=12.0, count=3)  # 2, 2, 2
    uneven.add(sum_w=4.0, sum_w2=10.0, count=2)  # 1, 3
    assert even.value == pytest.approx(1.0)
    assert uneven.value == pytest.approx(16 / 20)
    assert EffectiveSampleSize().value == 0.0


def test_ess_is_taken_before_truncation_and_the_truncated_one_is_beside_it() -> None:
    metrics = StepMetrics()
    metrics.add_row(
        fakes.pack(fakes.trajectories(1)), 1, row_loss([1.0, 9.0], [1.0, 5.0]), loss=0.25
    )
    values = metrics.values()
    assert values["ess"] == pytest.approx(100 / (2 * 82))
    assert values["ess_truncated"] == pytest.approx(36 / (2 * 26))
    assert values["clip_fraction"] == 0.5
    assert values["entropy"] == 0.5
    assert values["loss"] == 0.25
    assert "kl_ref" not in values
    assert "value_error" not in values
    assert (values["ratio_mean"], values["ratio_max"]) == (5.0, 9.0)
    # w - 1 - log w: 0 and 8 - log 9.
    assert values["kl_behavior"] == pytest.approx((8 - math.log(9)) / 2)


def test_lag_is_counted_per_token_from_the_version_that_trains() -> None:
    members = fakes.trajectories(2)
    batch = dataclasses.replace(
        fakes.pack(members), version_runs=(VersionRun(7, 2), VersionRun(9, 1), VersionRun(-20, 1))
    )
    metrics = StepMetrics()
    metrics.add_row(batch, 9, row_loss([1.0], [1.0], kl=[0.25]), loss=0.0)
    values = metrics.values()
    assert values["lag_mean"] == pytest.approx((2 * 2 + 0 + 29) / 4)
    assert values["lag_max"] == 29
    assert {
        key: value for key, value in values.items() if key.startswith("lag_histogram") and value
    } == {
        "lag_histogram_0": 1,
        "lag_histogram_2": 2,
        "lag_histogram_16_plus": 1,
    }
    assert values["kl_ref"] == 0.25


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_row_whose_loss_is_not_finite_is_counted_and_spoils_nothing(loss: float) -> None:
    metrics = StepMetrics()
    metrics.add_row(fakes.pack(fakes.trajectories(1)), 0, row_loss([1.0], [1.0]), loss=1.0)
    metrics.add_row(
        fakes.pack(fakes.trajectories(1)), 0, row_loss([float("nan")], [float("nan")]), loss=loss
    )
    values = metrics.values()
    assert values["non_finite_micro_batches"] == 1
    assert values["loss"] == 1.0
    assert values["ess"] == 1.0


def test_every_metric_knows_how_ranks_combine() -> None:
    total, largest, mean, ess, lags = (
        Total(),
        Maximum(),
        Mean(),
        EffectiveSampleSize(),
        LagHistogram(),
    )
    total.load(torch.tensor([[1.0], [2.0]]))
    largest.load(torch.tensor([[1.0], [2.0]]))
    mean.load(torch.tensor([[1.0, 1.0], [9.0, 4.0]]))
    ess.load(torch.tensor([[1.0, 1.0, 1.0], [3.0, 9.0, 1.0]]))
    lags.load(torch.stack([torch.ones(17), torch.arange(17)]))
    assert (total.value, largest.value, mean.value) == (3.0, 2.0, 2.0)
    assert ess.value == pytest.approx(16 / 20)
    assert lags.values()["lag_histogram_16_plus"] == 17
