"""The launcher of one node's ranks, with small programs in the place of ranks."""

import asyncio
import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest

from pipelinerl_common.service import EXIT_SETTINGS
from pipelinerl_trainer.__main__ import parse_flags
from pipelinerl_trainer.launch import Node, parse_node, run_node
from pipelinerl_trainer.ranks import cuda_index

DEADLINE_S = 60
RANK = """
import signal, sys, time
from pathlib import Path

flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
rank, folder, program = int(flags["--rank"]), Path(flags["--folder"]), flags["--program"].split(",")
if "deaf" in program:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "polite" in program:
    def stop(number, frame):
        (folder / f"stopped-{rank}").touch()
        sys.exit(0)
    signal.signal(signal.SIGTERM, stop)
(folder / f"started-{rank}").write_text(" ".join(sys.argv[1:]))
if f"fail{rank}" in program:
    sys.exit(3)
if f"killed{rank}" in program:
    signal.raise_signal(signal.SIGKILL)
while "finish" not in program:
    time.sleep(0.05)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rank_stand_in.py").write_text(textwrap.dedent(RANK))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return tmp_path


def node(folder: Path, program: str, num_processes: int = 2) -> Node:
    return Node(
        4,
        num_processes,
        ("--folder", str(folder), "--program", program),
        "127.0.0.1:1",
        module="rank_stand_in",
    )


async def run(started: Node, stop: asyncio.Event | None = None) -> int:
    return await asyncio.wait_for(run_node(started, stop or asyncio.Event()), DEADLINE_S)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)


async def test_every_rank_runs_under_its_own_number_and_the_first_serves_metrics(
    folder: Path,
) -> None:
    assert await run(node(folder, "finish")) == 0
    assert (
        "--rank 4 --name trainer-4 --log-level info --metrics-listen 127.0.0.1:1"
        in (folder / "started-4").read_text()
    )
    assert (folder / "started-5").read_text().endswith("--rank 5 --name trainer-5 --log-level info")


async def test_one_failed_rank_ends_the_others_and_gives_its_status(folder: Path) -> None:
    assert await run(node(folder, "fail5", num_processes=3)) == 3


async def test_a_rank_that_hangs_is_killed_after_another_has_failed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelinerl_trainer.launch.FAILED_GRACE_S", 0.5)
    assert await run(node(folder, "deaf,fail4")) == 3


async def test_a_killed_rank_counts_as_failed(folder: Path) -> None:
    assert await run(node(folder, "killed4")) == 128 + signal.SIGKILL


async def test_a_stop_reaches_every_rank(folder: Path) -> None:
    stop = asyncio.Event()
    running = asyncio.create_task(run(node(folder, "polite"), stop))
    for rank in (4, 5):
        await asyncio.to_thread(wait_for, folder / f"started-{rank}")
    stop.set()
    assert await running == 0
    assert (folder / "stopped-4").exists()
    assert (folder / "stopped-5").exists()


async def test_wrong_settings_of_real_ranks_come_out_as_the_nodes_status(folder: Path) -> None:
    flags = ("--job", str(folder / "nowhere.yaml"), "--num-ranks", "2", "--master-port", "1")
    assert await run(Node(0, 2, flags)) == EXIT_SETTINGS


def test_ranks_understand_what_the_launcher_gives_them() -> None:
    argv = [
        "--job",
        "j",
        "--listen",
        "10.0.0.1:7000",
        "--rank",
        "2",
        "--num-ranks",
        "4",
        "--master-port",
        "29500",
    ]
    flags = [
        "--name",
        "trainer-2",
        "--metrics-listen",
        "0.0.0.0:9090",
        "--resume",
        "--generator",
        "http://a",
        "--generator",
        "b",
    ]
    started = parse_node([*argv, *flags, "--processes", "2"])
    second = started.argv(1)
    assert second[:3] == (sys.executable, "-m", "pipelinerl_trainer")
    wiring, rank = parse_flags(second[3:])
    assert (wiring.name, wiring.listen, wiring.metrics_listen) == ("trainer-3", "10.0.0.1:7000", "")
    assert wiring.generators == ("http://a", "b")
    assert (rank.rank, rank.num_ranks, rank.master_port, rank.resume) == (3, 4, 29500, True)


def test_no_processes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_node(["--processes", "0"])
    assert caught.value.code == 2
    assert "--processes 0 must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_devices", "indices"), [(0, [0, 1, 2]), (1, [0, 0, 0]), (4, [0, 1, 2])]
)
def test_a_rank_has_the_only_device_that_it_sees_or_the_one_of_its_place(
    num_devices: int, indices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pipelinerl up` shows each rank its own device, a pod all of the node's to every rank."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_devices)
    assert [cuda_index(local_rank) for local_rank in range(3)] == indices
