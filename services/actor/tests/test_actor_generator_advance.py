"""The transformers engine can be taken a chosen number of tokens further, and shows what it samples
from.
"""

import asyncio
from pathlib import Path

import pytest
import torch

from pipelinerl_actor.generator.engine import EngineOptions, KVCache, Sampling
from pipelinerl_actor.generator.transformers_engine import TransformersEngine
from pipelinerl_actor.models.tiny import VOCAB_SIZE, make_tiny_model
from pipelinerl_common.settings import GeneratorSettings
from pipelinerl_common.types import VersionRun

SEEDS = (1, 2)


async def test_a_paused_engine_advances_by_tokens_and_shows_their_distributions(
    tmp_path: Path,
) -> None:
    seen: list[tuple[int | None, torch.Tensor]] = []
    settings = GeneratorSettings(engine="transformers", max_running_requests=8)
    options = EngineOptions(
        make_tiny_model(tmp_path), "float32", "model", 64, settings, 0, can_stage=True, on_cpu=True
    )
    engine = TransformersEngine(
        options, lambda sequence, logprobs_V: seen.append((sequence.sampling.seed, logprobs_V))
    )
    async with engine.running():
        await engine.pause(KVCache.KEEP)
        seen.clear()
        async with asyncio.TaskGroup() as group:
            samplings = [Sampling(6, seed=seed, ignore_eos=True) for seed in SEEDS]
            tasks = [
                group.create_task(engine.generate([40, 41], sampling)) for sampling in samplings
            ]
            await asyncio.sleep(0)  # both are handed in
            await engine.advance(3)
            await engine.advance(1)
            assert [seed for seed, _ in seen] == [1, 2] * 4
            await engine.set_version(1)
            await engine.resume()
    for seed, task in zip(SEEDS, tasks, strict=True):
        completion = task.result()
        assert completion.version_runs == (VersionRun(0, 4), VersionRun(1, 2))
        shown = [logprobs_V for number, logprobs_V in seen if number == seed]
        assert all(logprobs_V.shape == (VOCAB_SIZE,) for logprobs_V in shown)
        drawn = [
            float(logprobs_V[token])
            for logprobs_V, token in zip(shown, completion.token_ids, strict=True)
        ]
        assert drawn == pytest.approx(completion.logprobs)
