"""Learning rates by step."""

import pytest
import trainer_fakes as fakes

from pipelinerl_common.settings import OptimizerSettings
from pipelinerl_trainer.optimizer import learning_rate


def settings(**options: object) -> OptimizerSettings:
    return fakes.algorithm(optimizer={"learningRate": 1.0, **options}).optimizer


def rates(num_steps: int, optimizer: OptimizerSettings) -> list[float]:
    return [learning_rate(step, num_steps, optimizer) for step in range(num_steps)]


def test_constant_keeps_the_peak() -> None:
    assert rates(3, settings(minLearningRateRatio=0.5)) == [1.0, 1.0, 1.0]


def test_linear_runs_from_the_peak_to_the_floor() -> None:
    assert rates(5, settings(schedule="linear", minLearningRateRatio=0.2)) == pytest.approx(
        [1.0, 0.8, 0.6, 0.4, 0.2]
    )


def test_cosine_is_half_way_in_the_middle() -> None:
    assert rates(3, settings(schedule="cosine")) == pytest.approx([1.0, 0.5, 0.0])


def test_warm_up_rises_evenly_and_never_trains_with_zero() -> None:
    assert rates(4, settings(warmupSteps=3)) == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates(5, settings(warmupSteps=1, schedule="linear")) == pytest.approx(
        [0.5, 1.0, 2 / 3, 1 / 3, 0.0]
    )


def test_a_single_step_has_the_peak() -> None:
    assert rates(1, settings(schedule="cosine")) == [1.0]
