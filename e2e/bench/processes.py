"""Processes that a bench starts and measures: servers and generators with a log file, and workers,
programs of this package that report line by line.
"""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from pipelinerl_cli.up.process import LocalProcess
from pipelinerl_common.child_process import stop
from pipelinerl_common.errors import Unavailable

STOP_S = 10.0
POLL_S = 0.02
LAST_LINES = 40


@asynccontextmanager
async def running(argv: Sequence[str], log: Path) -> AsyncIterator[LocalProcess]:
    """Runs `argv`, whose first part "python" stands for this interpreter, with its output in `log`;
    stops it when the block is left, whatever happens.
    """
    process = await LocalProcess.start(log.stem, argv, log_file=log, environment=os.environ)
    try:
        yield process
    finally:
        await process.stop(STOP_S)


@asynccontextmanager
async def server(
    argv: Sequence[str], port: int, log: Path, timeout_s: float = 20.0
) -> AsyncIterator[LocalProcess]:
    """Runs a server and yields when it listens on `port`. Raises Unavailable with the log's last
    lines when it does not listen within `timeout_s`.
    """
    async with running(argv, log) as process:
        try:
            async with asyncio.timeout(timeout_s):
                await _wait_for_port(process, port)
        except TimeoutError:
            raise Unavailable(
                f"{argv[0]} does not listen on port {port} after {timeout_s:g} s: {tail(process)}"
            ) from None
        if process.exit_status is not None:
            raise Unavailable(f"{argv[0]} ended with status {process.exit_status}: {tail(process)}")
        yield process


async def _wait_for_port(process: LocalProcess, port: int) -> None:
    """Returns when a process listens on `port`, or when `process` has ended."""
    while process.exit_status is None:
        if await _listens(port):
            return
        await asyncio.sleep(POLL_S)


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


def tail(process: LocalProcess) -> str:
    """The last lines of a process's log, for an error's message."""
    return "\n".join(process.last_lines(LAST_LINES))


class Worker:
    """A module of this package in a process of its own. It prints a line when it is ready, waits
    for a line on standard input, and prints its result as another line.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._name, self._process = name, process

    @classmethod
    @asynccontextmanager
    async def start(cls, name: str, module: str, *arguments: str) -> AsyncIterator["Worker"]:
        """Starts `module`, which finds its package by PYTHONPATH; ends it with the block."""
        folder = str(Path(__file__).parents[1])
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", module, *arguments),
            stdin=PIPE,
            stdout=PIPE,
            env={**os.environ, "PYTHONPATH": folder},
        )
        try:
            yield cls(name, process)
        finally:
            await stop(process, STOP_S)

    def go(self) -> None:
        """Lets the worker, which is ready, begin."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")

    async def line(self, timeout_s: float) -> bytes:
        """The worker's next line. Raises Unavailable when it has ended, TimeoutError when it prints
        none within `timeout_s`.
        """
        assert self._process.stdout is not None
        async with asyncio.timeout(timeout_s):
            line = await self._process.stdout.readline()
        if not line:
            status = await self._process.wait()
            raise Unavailable(f"the {self._name} ended with status {status}; its error is above")
        return line


def process_tree(root: int) -> list[psutil.Process]:
    """The process `root` and all below it, parents first; empty when it has ended."""
    try:
        top = psutil.Process(root)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_seconds(process: psutil.Process) -> float:
    """User and system time of a process with all its threads, and with that of its children that
    have ended and were waited for; 0 when it has ended itself.
    """
    try:
        return float(sum(process.cpu_times()[:4]))
    except psutil.NoSuchProcess:
        return 0.0
