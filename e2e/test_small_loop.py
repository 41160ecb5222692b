"""The small loop learns, overlaps training with generation, and stays small."""

from pathlib import Path

import pytest

import small_loop
from pipelinerl_actor.models.tiny import Recipe, cached_model
from pipelinerl_common.settings import load_job

MAX_LINES = 250


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the first job, made here so that no cache of a user's is needed."""
    return cached_model(Recipe(), tmp_path_factory.mktemp("cache"))


def test_it_learns_from_tokens_of_older_policies(folder: Path) -> None:
    spec = load_job(small_loop.JOB).spec
    rewards, lags = [], []
    for _, batch, metrics in small_loop.SmallLoop(folder, spec, eta=2).run(15):
        rewards.append(batch.plan.metrics["reward_mean"])
        lags.append(metrics.lag_max.value)
        assert metrics.ess.value > 0.9
        assert metrics.num_trained_tokens.value == batch.plan.num_trained_tokens
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1
    assert max(lags) >= 1


def test_no_head_start_is_on_policy(folder: Path) -> None:
    spec = load_job(small_loop.JOB).spec
    for _, _, metrics in small_loop.SmallLoop(folder, spec, eta=0).run(3):
        assert metrics.lag_max.value == 0
        assert metrics.ess.value == pytest.approx(1.0, abs=1e-4)


def test_a_sequence_that_is_running_continues_with_the_new_weights(folder: Path) -> None:
    spec = load_job(small_loop.JOB).spec
    generator = small_loop.Generator(folder, spec)
    trainer = small_loop.Trainer(folder, spec)
    given = [*range(5, 9)]
    trajectory = small_loop.Trajectory(list(given), len(given))
    generator.decode_one_token([trajectory])
    generator.receive(trainer.snapshot(), 1)
    generator.decode_one_token([trajectory])
    assert trajectory.versions_T == [0, 1]
    assert len(trajectory.logprobs_T) == 2


def test_it_stays_small() -> None:
    text = Path(small_loop.__file__).read_text()
    assert text.count("\n") <= MAX_LINES
