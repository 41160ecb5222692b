"""The start-up check against a generator over HTTP."""

import asyncio

import pytest
import trainer_fakes as fakes
from trainer_fake_services import Generator

from pipelinerl_common.errors import FatalError, SettingsError
from pipelinerl_trainer import parity
from pipelinerl_trainer.engine import DeepSpeedEngine
from pipelinerl_trainer.event_loop import EventLoopProxy
from pipelinerl_trainer.model import PolicyModel
from pipelinerl_trainer.parity import ParityCheck, vocabulary_of
from pipelinerl_trainer.ranks import RankPlacement, join_ranks
from pipelinerl_trainer.source import TrainingStopped


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "PAUSE_S", 0.01)


async def check(
    *urls: str, token: str | None = None, stage: int = 1, stop: bool = False, version: int = 0
) -> float:
    """Runs the check as the loop does, in a thread beside the event loop."""
    spec = fakes.job(trainers={"parity": {"numPrompts": 3, "maxLogprobDifference": 0.01}}).spec
    events = EventLoopProxy()
    if stop:
        events.stop()

    def run() -> float:
        with join_ranks(RankPlacement()) as ranks:
            policy = PolicyModel(fakes.tiny_model(), with_value_head=False)
            engine = DeepSpeedEngine(policy, ranks, stage, spec.algorithm.optimizer)
            checking = ParityCheck(spec, urls, token, vocabulary_of(policy.language_model))
            assert checking.is_wanted
            return checking.run(engine, ranks, events, version)

    return await asyncio.to_thread(run)


@pytest.mark.parametrize("stage", [1, 3])
async def test_the_same_weights_pass(stage: int) -> None:
    with Generator() as generator:
        assert await check(generator.url, stage=stage) < 1e-5


async def test_every_generator_is_asked_and_one_that_is_not_ready_is_waited_for() -> None:
    with Generator() as ready, Generator(busy=2) as late:
        await check(ready.url, late.url)
    assert (ready.num_answers, late.num_answers, late.num_busy) == (2, 1, 0)


async def test_a_wrong_temperature_is_refused_with_both_numbers_and_the_field() -> None:
    with Generator(temperature_error=1.3) as generator, pytest.raises(SettingsError) as raised:
        await check(generator.url)
    message = str(raised.value)
    assert "trainers.parity.maxLogprobDifference=0.01" in message
    assert "96 tokens" in message
    found = float(message.partition("differ by ")[2].partition(" on average")[0])
    assert found > 0.01


async def test_the_token_is_sent() -> None:
    with Generator(token="secret") as generator:
        await check(generator.url, token="secret")


async def test_other_weights_are_no_answer_and_no_answer_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parity, "PATIENCE_S", 0.2)
    with Generator() as generator:
        generator.version = 4
        with pytest.raises(FatalError, match="no answers"):
            await check(generator.url)


async def test_a_stop_ends_the_check() -> None:
    with Generator(busy=10**6) as generator, pytest.raises(TrainingStopped):
        await check(generator.url, stop=True)


@pytest.mark.parametrize(
    ("prompts", "urls"), [(0, ("http://127.0.0.1:1",)), (2, ())], ids=["off", "no generator known"]
)
def test_the_check_can_be_off(prompts: int, urls: tuple[str, ...]) -> None:
    spec = fakes.job(trainers={"parity": {"numPrompts": prompts}}).spec
    assert not ParityCheck(spec, urls, None, fakes.VOCABULARY).is_wanted
