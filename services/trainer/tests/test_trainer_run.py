"""Whole runs of one rank in this process: real gRPC, a real nats-server, a real receiver group."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_toys as toys
from trainer_peers import DEADLINE_S, Coordinator, Peers, Preprocessor, serving, until
from transformers import AutoModelForCausalLM

from pipelinerl.v1 import metrics_pb2
from pipelinerl_common import stream
from pipelinerl_common.errors import FatalError, SettingsError
from pipelinerl_common.service import Wiring
from pipelinerl_common.settings import Job
from pipelinerl_common.stream import NatsServer
from pipelinerl_trainer import service
from pipelinerl_trainer.assembly import Run
from pipelinerl_trainer.ranks import Place


def run_of(job: Job, output: Path, peers: Peers, nats_url: str, *, listen: str, resume: bool = False) -> Run:
    wiring = Wiring(
        job_file=Path("job.yaml"),
        name="trainer-0",
        output=output,
        listen=listen,
        nats_url=nats_url,
        preprocessor=peers.preprocessor_address,
        coordinator=peers.coordinator_address,
        generators=(),
        references=(),
        token_file=None,
        log_level="info",
    )
    return Run(job, wiring, Place(), resume)


@dataclass
class Running:
    """A trainer that runs in this event loop."""

    peers: Peers
    output: Path
    task: asyncio.Task[None]
    stop: asyncio.Event

    async def end(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await self.task


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with NatsServer.start(tmp_path / "nats") as server:
        yield server


@asynccontextmanager
async def running(
    output: Path, nats: NatsServer, peers: Peers, *, form: bool = True, resume: bool = False, **spec: Any
) -> AsyncIterator[Running]:
    """A trainer on a tiny model with its group formed; ended by force when the block is left."""
    if not (output / "model").exists():
        toys.save_tiny_model(output / "model")
    listen = f"127.0.0.1:{free_port()}"
    peers.coordinator.trainer = listen
    stop = asyncio.Event()
    run = run_of(toys.job(**spec), output, peers, nats.url, listen=listen, resume=resume)
    task = asyncio.create_task(service.run_rank(run, stop), name="trainer")
    try:
        if form:
            forming = asyncio.create_task(peers.coordinator.form())
            await asyncio.wait({task, forming}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                forming.cancel()
                await task
            await forming
        yield Running(peers, output, task, stop)
    finally:
        stop.set()
        if not task.done():
            await asyncio.wait({task}, timeout=DEADLINE_S)


async def records_of(nats: NatsServer, count: int) -> list[metrics_pb2.MetricsRecord]:
    found: list[metrics_pb2.MetricsRecord] = []
    settings = toys.job().spec.stream
    async with asyncio.timeout(DEADLINE_S), stream.connect(nats.url, "toy", settings, name="test") as connection:
        async with connection.metrics() as records:
            async for record in records:
                found.append(record)
                if len(found) == count:
                    return found
    raise AssertionError("the stream ended")


async def test_a_run_trains_publishes_commits_and_exports(tmp_path: Path, nats: NatsServer) -> None:
    async with serving(Preprocessor(num_steps=4), Coordinator()) as peers:
        async with running(tmp_path, nats, peers) as trainer:
            await trainer.end()
        preprocessor, coordinator = peers.preprocessor, peers.coordinator
        assert preprocessor.trained == [0, 1, 2, 3]
        assert preprocessor.last_seen
        assert preprocessor.restores == [(0, False)]
        assert coordinator.versions[0] == 0
        assert preprocessor.published == coordinator.versions[: len(preprocessor.published)]
        assert not any(coordinator.rollbacks)
    first, *_, last = await records_of(nats, 4)
    assert (first.step, last.step, last.role, last.instance) == (1, 4, "trainer", "trainer-0")
    assert last.values["policy_version"] == 4
    assert last.values["num_sequences"] == 4
    assert last.values["success_mean"] == 0.5
    for name in ("reward_mean", "ess", "ess_truncated", "lag_mean", "grad_norm", "wait_seconds", "lag_histogram_0"):
        assert name in last.values, name
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype=torch.float32)
    initial = toys.tiny_model()
    moved = [
        float((a - b).abs().max()) for a, b in zip(exported.state_dict().values(), initial.state_dict().values(), strict=True)
    ]
    assert 0 < max(moved) < 0.01  # 4 steps of AdamW at 1e-3
