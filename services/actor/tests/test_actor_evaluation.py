"""pass@k by hand, intervals that cover, and an evaluation over a generator that speaks HTTP."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from actor_fakes import FakeGenerator, completion
from aiohttp import web

from pipelinerl_actor.evaluation.evaluate import Estimate, estimate, pass_at_k
from pipelinerl_actor.evaluation.generator import evaluator, until_ready
from pipelinerl_actor.rollout.start import GeneratorPool
from pipelinerl_actor.tasks.arithmetic import Arithmetic
from pipelinerl_common.errors import FatalError, Unavailable
from pipelinerl_common.settings import SamplingSettings, TaskSettings

ARITHMETIC = TaskSettings(
    path="pipelinerl_actor.tasks.arithmetic:Arithmetic",
    args={"digits": 1},
    group_size=4,
    sampling=SamplingSettings(max_tokens=4),
    max_retries=0,
)
TASK = Arithmetic(seed=0, digits=1)


def test_pass_at_k_counts_the_draws_that_hold_a_correct_answer() -> None:
    """Against all draws of k out of n."""
    for n in range(1, 7):
        for correct in range(n + 1):
            answers = [True] * correct + [False] * (n - correct)
            for k in range(1, n + 1):
                draws = list(itertools.combinations(answers, k))
                assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 1, 5), (4, 5, 1), (4, -1, 1), (4, 1, 0)])
def test_pass_at_k_refuses_what_makes_no_sense(n: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match="needs 1 <= k <= samples"):
        pass_at_k(n, correct, k)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    source = np.random.default_rng(7)
    draws = [estimate(source.beta(2, 3, size=60).tolist(), seed) for seed in range(200)]
    covered = sum(each.low <= 0.4 <= each.high for each in draws)
    assert 0.90 <= covered / len(draws) <= 0.99


def test_equal_values_have_the_interval_of_as_many_trials() -> None:
    """Wilson for 10 of 10: 1 / (1 + 1.96 ** 2 / 10) = 0.722."""
    perfect = estimate([1.0] * 10, 0)
    assert [perfect.mean, perfect.low, perfect.high] == pytest.approx([1.0, 0.7225, 1.0], abs=1e-4)
    assert estimate([0.0] * 10, 0).high == pytest.approx(1 - 0.7225, abs=1e-4)
    assert estimate([2.5, 2.5], 0) == Estimate(2.5, 2.5, 2.5)


def test_the_same_seed_gives_the_same_interval() -> None:
    values = np.linspace(0, 1, 40).tolist()
    assert estimate(values, 3) == estimate(values, 3) != estimate(values, 4)


async def test_an_evaluation_counts_what_passes_per_prompt(tmp_path: Path) -> None:
    """Every prompt gets the answers "7", "7", "x", "x": those whose sum is 7 pass@1 with a half,
    the others with none.
    """
    async with FakeGenerator().serving() as generator:

        async def answer(body: dict[str, Any]) -> web.StreamResponse:
            return web.json_response(completion(["7", "7", "x", "x"][: body["n"]], version=3))

        generator.answer = answer
        async with evaluator(
            TASK, ARITHMETIC, 0, GeneratorPool([generator.url], tmp_path, max_running=8)
        ) as evaluating:
            evaluation = await evaluating.run(range(50), (1, 2), seed=0)
    sums = [_sum(index) for index in range(50)]
    sevens = sum(value == 7 for value in sums) / 50
    assert 0 < sevens < 1
    assert evaluation.pass_at[1].mean == pytest.approx(sevens / 2)
    assert evaluation.pass_at[2].mean == pytest.approx(
        sevens * (1 - 1 / 6)
    )  # of six draws of two, one is "x", "x"
    assert evaluation.reward.mean == pytest.approx(sevens / 2)
    assert (evaluation.policy_version, evaluation.num_prompts, evaluation.num_samples) == (3, 50, 4)
    assert (evaluation.tokens_per_answer, evaluation.truncated_share, evaluation.failures) == (
        2.0,
        0.0,
        {},
    )


async def test_weights_that_change_meanwhile_are_refused(tmp_path: Path) -> None:
    async with FakeGenerator().serving() as generator:
        versions = itertools.count()

        async def answer(body: dict[str, Any]) -> web.StreamResponse:
            return web.json_response(completion(["7"] * body["n"], version=next(versions) // 5))

        generator.answer = answer
        async with evaluator(
            TASK, ARITHMETIC, 0, GeneratorPool([generator.url], tmp_path, max_running=8)
        ) as evaluating:
            with pytest.raises(FatalError, match=r"several versions of the weights: \[0, 1\]"):
                await evaluating.run(range(10), (1,), seed=0)


async def test_prompts_that_fail_are_counted_and_left_out(tmp_path: Path) -> None:
    async with FakeGenerator().serving() as generator:
        calls = itertools.count()

        async def answer(body: dict[str, Any]) -> web.StreamResponse:
            if next(calls) == 3:
                return web.json_response({"error": {"message": "too long"}}, status=400)
            return web.json_response(completion(["7"] * body["n"]))

        generator.answer = answer
        done: list[int] = []
        async with evaluator(
            TASK,
            ARITHMETIC,
            0,
            GeneratorPool([generator.url], tmp_path, max_running=8),
            lambda: done.append(1),
        ) as evaluating:
            evaluation = await evaluating.run(range(10), (1,), seed=0)
    assert evaluation.num_prompts == 9
    assert sum(evaluation.failures.values()) == 1
    assert len(done) == 10


async def test_no_prompt_at_all_is_an_error(tmp_path: Path) -> None:
    async with FakeGenerator().serving() as generator:

        async def answer(body: dict[str, Any]) -> web.StreamResponse:
            return web.json_response({"error": {"message": "no"}}, status=400)

        generator.answer = answer
        async with evaluator(
            TASK, ARITHMETIC, 0, GeneratorPool([generator.url], tmp_path, max_running=8)
        ) as evaluating:
            with pytest.raises(FatalError, match="none of the 3 prompts could be evaluated"):
                await evaluating.run(range(3), (1,), seed=0)


async def test_a_generator_that_ends_or_never_serves_is_told_apart() -> None:
    with pytest.raises(Unavailable, match="ended before it served anything"):
        await until_ready("http://127.0.0.1:1", 30, lambda: False)
    with pytest.raises(Unavailable, match=r"serves nothing after 0\.3 s"):
        await until_ready("http://127.0.0.1:1", 0.3, lambda: True)


def _sum(index: int) -> int:
    return int(TASK.prompt(index).facts["answer"])
