"""The experiment's small policy learns with every algorithm, and compensations of lag do nothing
where there is none.
"""

from collections.abc import Iterator

import pytest
import torch

from experiments.lag_compensation import RATES, VARIANTS, train
from pipelinerl_common.settings.algorithm import PRESETS

STEPS = 60


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The learning rate of a network this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", PRESETS)
def test_every_named_algorithm_learns(name: str) -> None:
    options = {"loss": name, "dropZeroAdvantage": False} | (
        {"baseline": "mean"} if name == "ppo" else {}
    )
    run = train(options, lag=2, rate=RATES[1], seed=0, steps=STEPS)
    assert run.steps_to_goal is not None, run


def test_the_task_does_not_teach_itself() -> None:
    """With a negligible learning rate the reward stays that of chance, 1 of 12."""
    assert train({}, lag=0, rate=1e-9, seed=0, steps=STEPS).final_reward < 0.2


@pytest.mark.parametrize("name", VARIANTS)
def test_without_lag_every_variant_is_the_same(name: str) -> None:
    expected = train({}, lag=0, rate=RATES[1], seed=1, steps=10).final_reward
    assert train(
        VARIANTS[name], lag=0, rate=RATES[1], seed=1, steps=10
    ).final_reward == pytest.approx(expected, rel=1e-6)
