"""Child processes of a bench: servers on free loopback ports, and their CPU time."""

import asyncio
import os
import socket
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from pipelinerl_common.errors import Unavailable

STOP_SECONDS = 10.0
POLL_SECONDS = 0.02
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def running(
    argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None
) -> AsyncIterator[Process]:
    """Runs `argv` with its output in `log`; ends it on the way out, whatever happens."""
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=DEVNULL, stdout=output, stderr=output, env=env
        )
    try:
        yield process
    finally:
        await stop(process)


async def stop(process: Process) -> None:
    """Asks the process to end and makes it after STOP_SECONDS."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()


@asynccontextmanager
async def server(
    argv: Sequence[str], port: int, log: Path, timeout_s: float = 20.0
) -> AsyncIterator[Process]:
    """Runs a server and yields when it listens on `port`. Raises Unavailable with the log's end
    when it never does.
    """
    async with running(argv, log) as process:
        try:
            async with asyncio.timeout(timeout_s):
                await _wait_for_port(process, port)
        except TimeoutError:
            raise Unavailable(
                f"{argv[0]} does not listen on port {port} after {timeout_s:g} s: {log_tail(log)}"
            ) from None
        if process.returncode is not None:
            raise Unavailable(f"{argv[0]} ended with status {process.returncode}: {log_tail(log)}")
        yield process


def log_tail(log: Path, size: int = 4000) -> str:
    """The last characters of a child's log, for an error's message."""
    return log.read_text(errors="replace")[-size:]


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def cpu_seconds(pid: int) -> float:
    """User and system time of a running process with all its threads, to 1/100 s: fields 14 and 15
    of /proc/PID/stat.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


async def _wait_for_port(process: Process, port: int) -> None:
    """Returns when something listens on `port` or the process has ended."""
    while process.returncode is None:
        if await _listens(port):
            return
        await asyncio.sleep(POLL_SECONDS)


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
