"""A started process keeps its exit status, however late the event loop is to collect it."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pipelinerl_common.child_process import send_signal, stop

DEADLINE_S = 20.0
Signal = Callable[[asyncio.subprocess.Process], None]


@pytest.fixture
def late_collection() -> Iterator[None]:
    """Statuses are collected by the event loop itself, so a busy loop is late. The default, a
    thread for each process, may lose the same race, but not in every run.
    """
    policy = asyncio.get_event_loop_policy()
    earlier = policy.get_child_watcher()
    policy.set_child_watcher(asyncio.PidfdChildWatcher())
    yield
    policy.set_child_watcher(earlier)


def block_until_ended(pid: int) -> None:
    """Blocks the event loop on purpose, so that it has not collected the status."""
    deadline = time.monotonic() + DEADLINE_S
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.005)


async def status_after(signal_it: Signal) -> int:
    """The exit status of a process that ended with 7 just before it was signalled."""
    # It ends when a line arrives: earlier, the event loop might collect its status in time.
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", "read line; exit 7", stdin=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.write(b"\n")
    block_until_ended(process.pid)
    assert process.returncode is None
    signal_it(process)
    async with asyncio.timeout(DEADLINE_S):
        return await process.wait()


@pytest.mark.parametrize(
    ("signal_it", "status"),
    [
        (lambda process: send_signal(process, signal.SIGTERM), 7),
        (lambda process: send_signal(process, signal.SIGKILL), 7),
        # What the helper is for; when Python no longer does this, it may go.
        (lambda process: process.terminate(), 255),
        (lambda process: process.kill(), 255),
    ],
)
def test_process_that_has_just_ended_keeps_its_status(
    late_collection: None, signal_it: Signal, status: int
) -> None:
    assert asyncio.run(status_after(signal_it)) == status


def test_signal_after_the_status_was_collected_reaches_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        process = await asyncio.create_subprocess_exec("true")
        await process.wait()
        monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("another process may be signalled"))
        send_signal(process, signal.SIGKILL)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("script", "was_enough", "status"),
    [
        ("trap 'exit 3' TERM; echo; while :; do sleep 0.01; done", True, 3),
        ("trap '' TERM; echo; while :; do sleep 0.01; done", False, -signal.SIGKILL),
    ],
)
def test_stop_asks_first_and_then_kills(script: str, was_enough: bool, status: int) -> None:
    async def run() -> tuple[bool, int]:
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", script, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        await process.stdout.readline()
        ended = await stop(process, DEADLINE_S if was_enough else 0.3)
        return ended, await process.wait()

    assert asyncio.run(run()) == (was_enough, status)


def test_cancelled_stop_still_ends_the_process() -> None:
    async def run() -> int | None:
        process = await asyncio.create_subprocess_exec(
            "sh",
            "-c",
            "trap '' TERM; echo; while :; do sleep 0.01; done",
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        await process.stdout.readline()
        stopping = asyncio.create_task(stop(process, DEADLINE_S))
        await asyncio.sleep(0.1)
        stopping.cancel()
        with suppress(asyncio.CancelledError):
            await stopping
        return process.returncode

    assert asyncio.run(run()) == -signal.SIGKILL
