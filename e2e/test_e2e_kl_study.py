"""The KL study on a small scale, with real engines and real updates: the orderings that the paper
finds (section 5.1).
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from experiments.kl import divergence
from experiments.kl.command import Flags, study_all
from experiments.kl.divergence import Estimate, equivalent_lag
from experiments.kl.engines import Schedule, StudiedTransformers, StudiedVllm
from experiments.kl.plots import write_plots
from experiments.kl.policy_sequence import PERIOD, PolicySequence, Recipe, make_prompts, train
from experiments.kl.study import CONVENTIONAL, KEPT, RECOMPUTED, Result
from pipelinerl_actor.generator.engine import KVCache

pytestmark = pytest.mark.timeout(600)

SCHEDULE = Schedule(num_tokens=48, max_lag=8)
STARTS = (0, 4)
NUM_SEQUENCES = 8


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The learning rate of a network this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def policies(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> PolicySequence:
    recipe = Recipe(
        SCHEDULE.num_tokens,
        max(STARTS) + SCHEDULE.max_lag,
        groups=4,
        base_steps=200,
        base_tokens=48,
    )
    *_, policies = train(recipe, tmp_path_factory.mktemp("base"))
    return policies


@pytest.fixture(scope="module")
def results(policies: PolicySequence) -> list[Result]:
    return asyncio.run(
        study_all(Flags("transformers", STARTS, SCHEDULE, NUM_SEQUENCES, seed=0), policies)
    )


def means(estimates: list[Estimate]) -> list[float]:
    return [estimate.mean for estimate in estimates]


def test_without_lag_there_is_no_divergence(results: list[Result]) -> None:
    """The engine's own distributions, token by token with a cache, against one forward of the same
    weights.
    """
    for result in results:
        for method, estimates in result.by_lag.items():
            assert abs(estimates[0].mean) < 1e-10, method
            assert estimates[1].mean > 1e-5, method


def test_conventional_divergence_grows_with_lag(results: list[Result]) -> None:
    for result in results:
        by_lag = means(result.by_lag[CONVENTIONAL])
        assert by_lag == sorted(by_lag)


@pytest.mark.parametrize("method", [KEPT, RECOMPUTED])
def test_in_flight_stays_closer_than_conventional_sampling_of_the_same_lag(
    results: list[Result], method: str
) -> None:
    for result in results:
        for lag in range(1, SCHEDULE.max_lag + 1):
            assert result.by_lag[method][lag].mean < result.by_lag[CONVENTIONAL][lag].mean, lag
        last = SCHEDULE.max_lag
        assert result.by_lag[method][last].high < result.by_lag[CONVENTIONAL][last].low


def test_old_kv_is_only_a_little_worse_than_recomputed_kv(results: list[Result]) -> None:
    """Kept KV adds less than half of what in-flight updates save."""
    for result in results:
        kept, recomputed, conventional = (
            result.by_lag[each][-1].mean for each in (KEPT, RECOMPUTED, CONVENTIONAL)
        )
        assert abs(kept - recomputed) < 0.5 * (conventional - recomputed)


def test_in_flight_the_first_tokens_are_the_farthest_from_on_policy(results: list[Result]) -> None:
    for result in results:
        for method in (KEPT, RECOMPUTED):
            blocks = means(result.by_token[method])
            assert sum(blocks[:2]) > 2 * sum(blocks[-2:])


async def test_weights_change_after_the_chosen_tokens_and_the_samples_are_the_same_every_time(
    policies: PolicySequence,
) -> None:
    studied = StudiedTransformers(policies, max_running=4)
    prompts_NP = make_prompts(2, torch.Generator().manual_seed(5))
    async with studied.running():
        first, again = [
            await studied.sample(prompts_NP, 12, 3, (5, 6, 10), KVCache.KEEP) for _ in range(2)
        ]
    assert first.versions_NT.tolist() == [[3] * 5 + [4] + [5] * 4 + [6] * 2] * 2
    assert first.swaps() == [5, 6, 10]
    assert torch.equal(first.ids_NS, again.ids_NS)
    assert torch.equal(first.logprobs_NT, again.logprobs_NT)


async def test_old_kv_is_old_and_recomputed_kv_is_that_of_the_new_weights(
    policies: PolicySequence,
) -> None:
    """The distributions of the tokens after a swap are those of a plain forward exactly where KV
    was recomputed.
    """
    studied = StudiedTransformers(policies, max_running=4)
    prompts_NP = make_prompts(2, torch.Generator().manual_seed(5))
    async with studied.running():
        await studied.compare_with(1)
        divergences = {}
        for kv_cache in KVCache:
            samples = await studied.sample(prompts_NP, 16, 0, (8,), kv_cache)
            divergences[kv_cache] = (await studied.divergence(samples))[:, 8:]
    assert divergences[KVCache.RECOMPUTE].abs().max() < 1e-10
    assert divergences[KVCache.KEEP].min() > 1e-8


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # of vLLM's imports
async def test_vllm_is_studied_too_and_tells_when_its_weights_changed(tmp_path: Path) -> None:
    """The same, by the sampled tokens. The engine decodes until it has stopped, so the change is
    never early.
    """
    recipe = Recipe(
        480, num_steps=1, groups=1, group_size=2, learning_rate=1e-2, base_steps=1, base_tokens=8
    )
    *_, policies = train(recipe, tmp_path)
    studied = StudiedVllm(policies, max_running=4)
    prompts_NP = make_prompts(2, torch.Generator().manual_seed(5))
    divergences = {}
    async with studied.running():
        for kv_cache in KVCache:
            samples = await studied.sample(prompts_NP, 480, 0, (8,), kv_cache)
            assert set(samples.versions_NT.flatten().tolist()) == {0, 1}
            assert samples.swaps()[0] >= 8
            for version in (0, 1):
                await studied.compare_with(version)
                divergences[kv_cache, version] = (await studied.divergence(samples))[
                    samples.versions_NT == version
                ]
    assert divergences[KVCache.KEEP, 0].max() < 1e-8
    assert divergences[KVCache.RECOMPUTE, 0].max() < 1e-8
    assert divergences[KVCache.RECOMPUTE, 1].max() < 1e-8
    assert divergences[KVCache.KEEP, 1].mean() > 1e-6


async def test_the_estimate_from_sampled_tokens_agrees_with_the_exact_divergence(
    policies: PolicySequence,
) -> None:
    studied = StudiedTransformers(policies, max_running=16)
    prompts_NP = make_prompts(16, torch.Generator().manual_seed(5))
    async with studied.running():
        samples = await studied.sample(prompts_NP, SCHEDULE.num_tokens, 0, (), KVCache.KEEP)
        await studied.compare_with(8)
        exact = Estimate.of(await studied.divergence(samples)).mean
        target_NTV = studied.target(samples.ids_NS)
    sampled_NT1 = samples.ids_NS[:, PERIOD:, None]
    estimate = Estimate.of(
        divergence.k3(samples.logprobs_NT, target_NTV.gather(2, sampled_NT1)[:, :, 0])
    )
    assert estimate.low < exact < estimate.high
    assert estimate.high - estimate.low < exact


def test_divergences_by_hand() -> None:
    """mu = (1/2, 1/2), pi = (1/4, 3/4): KL = ln 2 - ln 3 / 2; k3 of the first token is 1/2 - 1 + ln
    2.
    """
    mu, pi = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    assert divergence.exact(mu[None, None], pi[None, None]).item() == pytest.approx(
        0.143841, abs=1e-6
    )
    k3 = [divergence.k3(mu[token, None, None], pi[token, None, None]).item() for token in (0, 1)]
    assert k3 == pytest.approx([0.193147, 0.094535], abs=1e-6)
    assert sum(k3) / 2 == pytest.approx(0.143841, abs=1e-6)


def test_equivalent_lag() -> None:
    assert equivalent_lag([0.0, 1.0, 4.0], 2.5) == 1.5
    assert equivalent_lag([0.0, 1.0, 4.0], 5.0) is None


def test_schedule_is_the_papers() -> None:
    """L = 2048, g_max = 32: every 64 tokens, the first time after 128."""
    schedule = Schedule(2048, 32)
    assert list(schedule.swaps[:3]) == [128, 192, 256]
    assert [schedule.end(lag) for lag in (0, 1, 30, 32)] == [128, 192, 2048, 2048]
    with pytest.raises(ValueError, match="num_tokens=50 must be a multiple of max_lag=8"):
        Schedule(50, 8)


def test_plots(results: list[Result], tmp_path: Path) -> None:
    write_plots(tmp_path / "plots", results)
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert names == {f"kl-by-{axis}-{start}.svg" for axis in ("lag", "token") for start in STARTS}
    by_lag = (tmp_path / "plots" / "kl-by-lag-0.svg").read_text(encoding="utf-8")
    assert by_lag.count("<polygon") == by_lag.count("<polyline") == 3
