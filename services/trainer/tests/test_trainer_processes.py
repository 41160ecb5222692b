"""The trainer as it is started: `python -m pipelinerl_trainer`, with two ranks, signals, and kill
-9.
"""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_fakes as fakes
from safetensors.torch import load_file
from trainer_fake_services import (
    DEADLINE_S,
    Coordinator,
    Generator,
    Peers,
    Preprocessor,
    serving,
    until,
)

from pipelinerl_common.stream import NatsServer
from pipelinerl_trainer.__main__ import main, parse_flags

START_S = 200.0
SOURCES = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
"""Where another checkout than the installed one is tested."""


@dataclass
class Rank:
    process: asyncio.subprocess.Process
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    async def status(self) -> int:
        async with asyncio.timeout(DEADLINE_S):
            return await self.process.wait()


@dataclass
class Launcher:
    """Starts all ranks of a trainer on the same folder and peers, any number of times."""

    output: Path
    peers: Peers
    nats: NatsServer
    job_file: Path
    num_ranks: int
    generators: Sequence[str] = ()

    @asynccontextmanager
    async def start(self, *flags: str, as_node: bool = False) -> AsyncIterator[list[Rank]]:
        """Starts all ranks, or the one process that starts them; kills them when the block ends."""
        with (
            socket.create_server(("127.0.0.1", 0)) as one,
            socket.create_server(("127.0.0.1", 0)) as two,
        ):
            listen, master = (f"127.0.0.1:{probe.getsockname()[1]}" for probe in (one, two))
        self.peers.coordinator.trainer = listen
        modules = (
            ["pipelinerl_trainer.launch"] if as_node else ["pipelinerl_trainer"] * self.num_ranks
        )
        flags = (*flags, "--processes", str(self.num_ranks)) if as_node else flags
        ranks = [
            await self._launch(rank, module, (listen, master), flags)
            for rank, module in enumerate(modules)
        ]
        try:
            yield ranks
        finally:
            for rank in ranks:
                if rank.process.returncode is None:
                    rank.process.kill()
                await rank.process.wait()

    async def _launch(
        self, rank: int, module: str, addresses: tuple[str, str], flags: Sequence[str]
    ) -> Rank:
        listen, master = addresses
        host, _, port = master.rpartition(":")
        log_file = self.output / f"trainer-{rank}.log"
        arguments = {
            "--job": self.job_file,
            "--name": f"trainer-{rank}",
            "--output": self.output,
            "--listen": listen,
            "--nats-url": self.nats.url,
            "--preprocessor": self.peers.preprocessor_address,
            "--coordinator": self.peers.coordinator_address,
            "--rank": rank,
            "--num-ranks": self.num_ranks,
            "--master-address": host,
            "--master-port": port,
        }
        given = [str(part) for pair in arguments.items() for part in pair]
        urls = [part for url in self.generators for part in ("--generator", url)]
        with log_file.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, *given, *urls, *flags),
                stdout=log,
                stderr=log,
                env={
                    "PATH": "/usr/bin:/bin",
                    "OMP_NUM_THREADS": "1",
                    "HF_HUB_OFFLINE": "1",
                    **SOURCES,
                },
            )
        return Rank(process, log_file)


@asynccontextmanager
async def launcher(
    output: Path, preprocessor: Preprocessor, num_ranks: int, **spec: Any
) -> AsyncIterator[Launcher]:
    fakes.save_tiny_model(output / "model")
    job_file = output / "job.yaml"
    job_file.write_text(
        json.dumps(fakes.job(**spec).model_dump(mode="json", by_alias=True, exclude_none=True))
    )
    async with (
        serving(preprocessor, Coordinator()) as peers,
        NatsServer.start(output / "nats") as nats,
    ):
        yield Launcher(output, peers, nats, job_file, num_ranks)


async def test_two_ranks_are_killed_and_the_same_run_goes_on(tmp_path: Path) -> None:
    """ZeRO 3: parity check over both ranks, a rank with another batch, kill -9, resume as one
    node's ranks, the end.
    """
    preprocessor = Preprocessor(num_steps=9, hold_at=2, lost_ranks={1})
    spec = {
        "algorithm": {"steps": 4},
        "trainers": {
            "zeroStage": 3,
            "processesPerNode": 2,
            "parity": {"numPrompts": 2, "maxLogprobDifference": 0.001},
            "checkpoint": {"everySteps": 1},
        },
    }
    async with launcher(tmp_path, preprocessor, 2, **spec) as launch:
        with Generator() as generator:
            launch.generators = [generator.url]
            async with launch.start("--resume") as (leader, follower):
                await launch.peers.coordinator.form()
                await until(
                    lambda: preprocessor.num_held > 0 or leader.process.returncode is not None,
                    "step 2",
                    START_S,
                )
                assert "parity mean=" in leader.log, leader.log[-3000:]
                follower.process.kill()
                assert await leader.status() == 1, leader.log[-3000:]
                assert "FatalError: rank 0 of 2: another rank is lost" in leader.log
        assert not preprocessor.lost_ranks
        launch.generators = []
        preprocessor.hold_at = None
        async with launch.start("--resume", as_node=True) as (node,):
            await launch.peers.coordinator.form()
            assert await node.status() == 0, node.log[-3000:]
    assert preprocessor.trained == [0, 1, 2, 3]
    assert preprocessor.restores == [(0, False), (2, True)]
    assert preprocessor.last_seen
    assert (tmp_path / "checkpoints" / "step-4" / "optimizer" / "rank-1.safetensors").exists()
    final = load_file(tmp_path / "final" / "model.safetensors")
    assert set(final) == set(load_file(tmp_path / "model" / "model.safetensors"))
    assert all(bool(torch.isfinite(weight).all()) for weight in final.values())


async def test_a_signal_ends_a_rank_with_a_checkpoint_and_status_0(tmp_path: Path) -> None:
    preprocessor = Preprocessor(num_steps=9, hold_at=1)
    async with launcher(tmp_path, preprocessor, 1) as launch, launch.start() as (rank,):
        await launch.peers.coordinator.form()
        await until(
            lambda: preprocessor.num_held > 0 or rank.process.returncode is not None,
            "step 1",
            START_S,
        )
        rank.process.send_signal(signal.SIGTERM)
        assert await rank.status() == 0, rank.log[-3000:]
    assert (tmp_path / "checkpoints" / "step-1" / "manifest.json").exists()
    assert "stopped after step 1" in rank.log


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rank", "2", "--num-ranks", "2"], "--rank 2 must be from 0 to --num-ranks 2 minus 1"),
        (["--num-ranks", "2"], "--master-port 0 must be a port"),
        (["--rank", "first"], "invalid int value"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_wrong_flags_are_named(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        parse_flags(["--job", "job.yaml", *argv])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_help_tells_of_all_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parse_flags(["--help"])
    assert raised.value.code == 0
    shown = capsys.readouterr().out
    assert "--master-port" in shown
    assert "--preprocessor" in shown


def test_flags_are_split_into_wiring_and_ranks() -> None:
    argv = [
        "--job",
        "j.yaml",
        "--rank",
        "1",
        "--num-ranks",
        "2",
        "--master-port",
        "9",
        "--reference",
        "http://r",
        "--resume",
    ]
    wiring, flags = parse_flags(argv)
    assert wiring.references == ("http://r",)
    assert (flags.rank, flags.num_ranks, flags.master_port, flags.resume) == (1, 2, 9, True)


def test_a_job_file_that_is_not_there_ends_with_status_2(tmp_path: Path) -> None:
    assert (
        main(
            ["--job", str(tmp_path / "none.yaml"), "--preprocessor", "a:1", "--coordinator", "b:1"]
        )
        == 2
    )


def test_a_missing_peer_ends_with_status_2(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        json.dumps(fakes.job().model_dump(mode="json", by_alias=True, exclude_none=True))
    )
    assert main(["--job", str(tmp_path / "job.yaml"), "--preprocessor", "a:1"]) == 2
