"""Two tensor-parallel workers on a CPU: a smoke test, because two cores starve on it."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from actor_generator_harness import Client, GeneratorProcess, Reference, Trainer, write_job

from pipelinerl_actor.models.tiny import make_tiny_model

psutil = pytest.importorskip("psutil", reason="comes with vLLM")

PROMPT = [40, 41, 42, 43]


@pytest.fixture
def generator(tmp_path: Path) -> Iterator[GeneratorProcess]:
    make_tiny_model(tmp_path / "model", num_heads=4, tie_word_embeddings=True)
    process = GeneratorProcess(
        tmp_path, write_job(tmp_path, engine="vllm", tensorParallelSize=2), "--serve-initial"
    )
    yield process
    process.kill()


@pytest.mark.vllm
async def test_every_worker_gets_its_share_of_every_update(
    generator: GeneratorProcess, tmp_path: Path
) -> None:
    client, reference = Client(generator.url), Reference(tmp_path / "model")
    trainer = Trainer(client, num_workers=2)
    assert (await client.weights())["num_workers"] == 2
    for mode in ("staged", "inplace"):
        weights = reference.random(seed=trainer.version)
        await trainer.update(weights, mode=mode)
        choice = await client.choice(PROMPT, 16)
        assert choice["weight_versions"] == [[trainer.version, 16]]
        expected = reference.logprobs(weights, PROMPT, choice["token_ids"])
        assert (
            max(abs(a - b) for a, b in zip(expected, choice["token_logprobs"], strict=True)) <= 1e-4
        )
    trainer.leave()
    workers = [
        child
        for child in psutil.Process(generator.process.pid).children(recursive=True)
        if "Worker" in child.name()
    ]
    assert len(workers) == 2, "vLLM's worker processes are identified by their names"
    workers[0].kill()
    assert await asyncio.to_thread(generator.process.wait, 60) == 1
    assert any("engine died" in line for line in generator.log)
