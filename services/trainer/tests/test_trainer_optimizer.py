"""Delay compensation by hand, under DeepSpeed, and off."""

from types import SimpleNamespace

import pytest
import torch
import trainer_fakes as fakes
from torch import nn

from pipelinerl_common.settings import OptimizerSettings
from pipelinerl_trainer import optimizer
from pipelinerl_trainer.engine import DeepSpeedEngine
from pipelinerl_trainer.optimizer import LAG, DelayCompensatedAdamW, make_optimizer
from pipelinerl_trainer.ranks import RankPlacement, join_ranks


def settings(**options: object) -> OptimizerSettings:
    return OptimizerSettings.model_validate(
        {"learningRate": 0.1, "betas": (0.5, 0.5), "eps": 1e-12, **options}
    )


def steps(
    optimizer: torch.optim.AdamW, weight: nn.Parameter, gradients: list[float], lag: float
) -> list[float]:
    seen = []
    for gradient in gradients:
        weight.grad = torch.tensor([gradient], dtype=torch.float64)
        for group in optimizer.param_groups:
            group[LAG] = lag
        optimizer.step()
        seen.append(float(weight.detach()))
    return seen


@pytest.mark.parametrize(("device", "is_fused"), [("cpu", None), ("cuda", True)])
def test_the_update_is_fused_on_a_device(
    device: str, is_fused: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool | None] = []

    def adamw(_: object, *, fused: bool | None, **__: object) -> None:
        asked.append(fused)

    monkeypatch.setattr(optimizer, "AdamW", adamw)
    weight = SimpleNamespace(device=torch.device(device))
    make_optimizer([weight], settings())  # type: ignore[list-item] # no CUDA device is needed
    assert asked == [is_fused]


def test_the_gradient_is_moved_along_the_course_of_the_weights() -> None:
    weight = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = make_optimizer([weight], settings(), 0.5)
    assert isinstance(optimizer, DelayCompensatedAdamW)
    # Step 1: Adam's first update is -lr: 0.9. The moving average of updates is 0.5 * -0.1 = -0.05,
    # v = 0.5 * 4 = 2.
    # Step 2: drift = 3 * -0.05 = -0.15; g = 2 + 0.5 / sqrt(2) * 4 * -0.15 = 2 - 0.2121320...
    gradient = 2 - 0.5 / 2**0.5 * 4 * 0.15
    mean = (0.5 * 0.5 * 2 + 0.5 * gradient) / 0.75
    variance = (0.5 * 0.5 * 4 + 0.5 * gradient**2) / 0.75
    expected = 0.9 - 0.1 * mean / variance**0.5
    assert steps(optimizer, weight, [2.0, 2.0], lag=3.0) == pytest.approx([0.9, expected])
    # The average after it: 0.5 * -0.05 + 0.5 * (second update).
    assert float(optimizer.state[weight]["update"]) == pytest.approx(
        0.5 * -0.05 + 0.5 * (expected - 0.9)
    )


def test_without_lag_it_is_adamw() -> None:
    gradients = [2.0, -1.0, 0.5]
    plain, compensated = (nn.Parameter(torch.tensor([1.0], dtype=torch.float64)) for _ in range(2))
    expected = steps(make_optimizer([plain], settings()), plain, gradients, lag=0.0)
    found = steps(
        make_optimizer([compensated], settings(), 0.5),
        compensated,
        gradients,
        lag=0.0,
    )
    assert found == expected
    assert type(make_optimizer([plain], settings())) is torch.optim.AdamW


def test_a_weight_without_a_gradient_is_left_alone() -> None:
    weight, idle = (nn.Parameter(torch.tensor([1.0], dtype=torch.float64)) for _ in range(2))
    optimizer = make_optimizer([weight, idle], settings(), 0.5)
    steps(optimizer, weight, [2.0, 2.0], lag=1.0)
    assert float(idle.detach()) == 1.0
    assert idle not in optimizer.state
    with pytest.raises(ValueError, match="no closure"):
        optimizer.step(lambda: 0.0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_under_deepspeed_the_lag_of_the_batch_counts_and_the_state_is_saved(stage: int) -> None:
    weights = {}
    for compensation in (0.0, 20.0):
        job = fakes.full_algorithm(
            optimizer={"learningRate": 1e-2}, experimental={"delayCompensation": compensation}
        )
        with join_ranks(RankPlacement()) as ranks:
            engine = DeepSpeedEngine(
                fakes.tiny_policy(job), ranks, stage, job.optimizer, compensation
            )
            learner = fakes.learner(engine, ranks, job)
            for step in (1, 2, 3):
                everything = fakes.trajectories(4, seed=step)
                values = fakes.train_step(learner, fakes.batch_of([everything], everything, step))
            assert values["lag_mean"] > 0
            weights[compensation] = torch.cat(
                [weight.flatten().clone() for _, weight in engine.served_weights()]
            )
            assert any(name.endswith(".update") for name in engine.optimizer_tensors()) is (
                compensation > 0
            )
    difference = float((weights[0.0] - weights[20.0]).abs().max())
    assert 1e-6 < difference < 0.1
