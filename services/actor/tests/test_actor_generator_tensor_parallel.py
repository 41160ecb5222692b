"""Two tensor-parallel workers on a CPU: a smoke test, because two cores starve on it."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from actor_generator_harness import Client, GeneratorProcess, Reference, Trainer, write_job

from pipelinerl_actor.models.tiny import make_tiny_model
from pipelinerl_weights.group import TransferGroup

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


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of modules that vLLM imports
def test_a_worker_joins_with_the_nccl_settings_that_the_others_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU with batch-invariant decoding, for which vLLM pins variables in its process."""
    from vllm.utils import nccl

    from pipelinerl_actor.generator import vllm_worker

    monkeypatch.setattr(nccl, "_unpinned_env", {"NCCL_ALGO": None, "NCCL_PROTO": "LL"})
    monkeypatch.setenv("NCCL_ALGO", "allreduce:tree")
    monkeypatch.setenv("NCCL_PROTO", "Simple")
    seen: list[tuple[str | None, str | None]] = []

    def join(*args: Any, **kwargs: Any) -> None:
        seen.append((os.environ.get("NCCL_ALGO"), os.environ.get("NCCL_PROTO")))

    monkeypatch.setattr(TransferGroup, "join", join)
    worker = vllm_worker.GeneratorWorker.__new__(vllm_worker.GeneratorWorker)
    worker._group, worker.device = None, torch.device("cpu")
    worker._join(1, {"master_address": "127.0.0.1", "master_port": 1})
    assert seen == [(None, "LL")]
    assert (os.environ["NCCL_ALGO"], os.environ["NCCL_PROTO"]) == ("allreduce:tree", "Simple")
