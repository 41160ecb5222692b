"""Trajectories: exact tokens over several turns, deadlines that stand while a request waits."""

import asyncio
import random
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from actor_fakes import TOKENIZER, FakeGenerator, ScriptedGenerator, trajectory, until
from aiohttp import web

from pipelinerl_actor.models.chat import Continuation
from pipelinerl_actor.models.tiny import make_tiny_model
from pipelinerl_actor.rollout.failures import GivenUp
from pipelinerl_actor.rollout.generator_client import RolloutClient, TurnRequest
from pipelinerl_actor.rollout.generators import Generators, TrajectoryClock
from pipelinerl_actor.rollout.metrics import RolloutMeter
from pipelinerl_actor.rollout.trajectory import TokenRecord, check_verdict
from pipelinerl_actor.task import Prompt, Turn, Verdict
from pipelinerl_actor.tasks.guess_number import GuessNumber
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.metrics import Metrics
from pipelinerl_common.settings import SamplingSettings
from pipelinerl_common.types import FinishReason, VersionRun


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=32, num_layers=1)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
async def test_turns_continue_the_sampled_tokens_exactly(
    session: aiohttp.ClientSession, model_folder: Path, finish_reason: str
) -> None:
    task = GuessNumber(seed=0, max_turns=3)
    prompt = Prompt.of("Guess.", number=5)
    async with ScriptedGenerator(["4", "6x", "5"], finish_reason).serving() as generator:
        rollout = trajectory(generator, session, model_folder, prompt)
        verdict = await task.rollout(rollout)
    assert verdict.reward == pytest.approx(1 / 3)
    assert verdict.metrics == {"success": 1.0, "turns": 3}
    sample = rollout.record.to_sample(0, verdict)
    dialogue = (
        "<|user|>Guess.<|end|><|assistant|>4<|end|><|user|>higher<|end|><|assistant|>6x<|end|>"
        "<|user|>not a number<|end|>"
    )
    last_end = "<|end|>" if finish_reason == "stop" else ""
    assert TOKENIZER.decode(sample.token_ids_S.tolist()) == f"{dialogue}<|assistant|>5{last_end}"
    given, sampled = sample.segment_lengths[::2], sample.segment_lengths[1::2]
    assert sampled == ((2, 3, 2) if finish_reason == "stop" else (1, 2, 1))
    assert sum(given) + sum(sampled) == len(sample.token_ids_S)
    assert len(sample.logprobs_T) == sum(sampled)
    assert sample.version_runs == (
        VersionRun(0, sampled[0]),
        VersionRun(1, sampled[1] + sampled[2]),
    )


async def test_only_the_first_turn_is_tokenised_by_the_generator(
    session: aiohttp.ClientSession, model_folder: Path
) -> None:
    async with ScriptedGenerator(["4", "5"]).serving() as generator:
        await GuessNumber(seed=0).rollout(
            trajectory(generator, session, model_folder, Prompt.of("Guess.", number=5))
        )
        first, second = generator.requests
    assert "messages" in first
    assert "messages" not in second
    assert TOKENIZER.decode(second["prompt_token_ids"][-2:]) == "<|end|><|assistant|>"


async def test_complete_adds_token_ids_as_they_are(
    session: aiohttp.ClientSession, model_folder: Path
) -> None:
    async with ScriptedGenerator(["1", "2"]).serving() as generator:
        rollout = trajectory(generator, session, model_folder, Prompt(()))
        first = await rollout.complete([4, 50, 51])
        await rollout.complete([60])
    assert [request["prompt_token_ids"] for request in generator.requests] == [
        [4, 50, 51],
        [4, 50, 51, *first.token_ids, 60],
    ]
    assert rollout.record.segment_lengths == [3, 2, 1, 2]
    assert [turn.text for turn in rollout.turns] == ["1", "2"]


async def test_a_generator_that_changes_the_prompt_is_given_up() -> None:
    record = TokenRecord()
    turn = Turn("7", (9,), (-1.0,), (VersionRun(0, 1),), FinishReason.STOP)
    record.add([1, 2], turn)
    with pytest.raises(GivenUp, match="not what it was sent"):
        record.add([1, 3, 9, 4], turn)


async def test_a_model_without_a_chat_template_cannot_play_several_turns(
    model_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(
        model_folder, tmp_path, ignore=lambda *_: ["chat_template.jinja"], dirs_exist_ok=True
    )
    with pytest.raises(SettingsError, match="has no chat template"):
        await Continuation(tmp_path).token_ids([5], [{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        (1.0, "bad_verdict"),
        (None, "bad_verdict"),
        (Verdict("good"), "bad_verdict"),  # type: ignore[arg-type]
        (Verdict(float("nan")), "non_finite_reward"),
        (Verdict(float("-inf")), "non_finite_reward"),
        (Verdict(1.0, {"x": float("nan")}), "non_finite_metric"),
        (Verdict(1.0, {"x": "y"}), "bad_verdict"),  # type: ignore[dict-item]
    ],
)
def test_verdicts_must_be_finite_numbers(verdict: object, reason: str) -> None:
    with pytest.raises(GivenUp) as raised:
        check_verdict(verdict)
    assert raised.value.reason == reason


def test_guess_number_hides_numbers_in_range() -> None:
    task = GuessNumber(seed=1, highest=3)
    assert {task.prompt(index).facts["number"] for index in range(100)} == {0, 1, 2, 3}
    with pytest.raises(SettingsError, match="max_turns=0"):
        GuessNumber(seed=0, max_turns=0)


async def test_the_clock_stands_while_a_request_waits_for_a_slot(
    session: aiohttp.ClientSession,
) -> None:
    async with FakeGenerator().serving() as generator:
        release = asyncio.Event()

        async def slow(body: dict[str, Any]) -> web.StreamResponse:
            await release.wait()
            return await generator.say(body)

        generator.script.append(slow)
        generators = Generators(
            [RolloutClient(generator.url, session, None)],
            max_running=1,
            max_retries=0,
            meter=RolloutMeter(Metrics("actor", "test")),
        )
        request = TurnRequest(SamplingSettings(), prompt_token_ids=[4])

        async def timed(limit_s: float) -> None:
            clock = TrajectoryClock(limit_s)
            async with clock.running():
                await generators.complete(request, clock)

        first = asyncio.ensure_future(timed(30))
        await until(lambda: generator.num_running == 1)
        second = asyncio.ensure_future(timed(0.2))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await asyncio.shield(second)
        release.set()
        await asyncio.gather(first, second)
        assert generators.num_running == 0


async def test_a_clock_ends_a_block_that_takes_too_long() -> None:
    clock = TrajectoryClock(0.01)
    with pytest.raises(TimeoutError):
        async with clock.running():
            await asyncio.Event().wait()
    assert clock.expired


async def test_waiting_requests_are_served_in_order_and_cancelled_ones_leave_no_slot_taken(
    session: aiohttp.ClientSession,
) -> None:
    async with FakeGenerator().serving() as generator:
        generators = Generators(
            [RolloutClient(generator.url, session, None)],
            max_running=2,
            max_retries=0,
            meter=RolloutMeter(Metrics("actor", "test")),
        )
        request = TurnRequest(SamplingSettings(), prompt_token_ids=[4])
        generator.answer = generator.hang
        waiting = [
            asyncio.ensure_future(generators.complete(request, TrajectoryClock(30)))
            for _ in range(5)
        ]
        await until(lambda: generator.num_running == 2)
        for task in random.Random(0).sample(waiting, 5):
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await until(lambda: generator.num_running == 0)
        generator.answer = generator.say
        await generators.complete(request, TrajectoryClock(30))
        assert generators.num_running == 0
