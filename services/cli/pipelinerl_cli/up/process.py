"""One local process of the run: tethered to this one, in a process group of its own, its output in
a log file.
"""

import asyncio
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from pipelinerl_cli.up.guard import Guard

TETHER = str(Path(__file__).with_name("tether.py"))
TAIL_BYTES = 16384
LOG_PREFIX = re.compile(r"^\S+Z [A-Z]+ \S+ ")
"""Time, level and process of a log line, which its reader on the display knows."""


def tethered(argv: Sequence[str]) -> tuple[str, ...]:
    """`argv` as a command that ends with this process. Start it from the main thread: Linux ties it
    to the starting thread.
    """
    return (sys.executable, "-I", "-S", TETHER, str(os.getpid()), *argv)


class Process:
    """A started process. `exit_status` is negative for a signal."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        log_file: Path,
        log_start: int,
        guard: Guard | None,
    ) -> None:
        self.name = name
        self._guard = guard
        self.log_file = log_file
        self._log_start = log_start
        self._process = process
        self._is_asked = False
        self._group_ended = False

    @classmethod
    async def start(
        cls,
        name: str,
        argv: Sequence[str],
        *,
        log_file: Path,
        environment: Mapping[str, str],
        guard: Guard | None = None,
    ) -> "Process":
        """Starts `argv`, whose first part "python" stands for this interpreter; output is appended
        to `log_file`.
        """
        command = [sys.executable, *argv[1:]] if argv[0] == "python" else list(argv)
        with log_file.open("ab") as log:
            log.write(f"--- {datetime.now(UTC):%Y-%m-%dT%H:%M:%S}Z {name} starts\n".encode())
            log.flush()
            start = log.tell()
            process = await asyncio.create_subprocess_exec(
                *tethered(command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environment),
                start_new_session=True,
            )
        if guard is not None:
            guard.add(process.pid)
        return cls(name, process, log_file, start, guard)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        """Exit status, once the process has ended; what it started and left behind in its group is
        ended too.
        """
        status = await self._process.wait()
        self._end_group()
        return status

    def terminate(self) -> None:
        """Asks the process, not its whole group, to end. Once: a second signal would cut short what
        it does before.
        """
        if self.exit_status is None and not self._is_asked:
            self._is_asked = True
            self._process.terminate()

    def kill(self) -> None:
        """Ends the process and everything in its group."""
        self._end_group()

    async def stop(self, grace_s: float) -> int:
        """SIGTERM, and SIGKILL when it has not ended after `grace_s`."""
        self.terminate()
        try:
            async with asyncio.timeout(grace_s):
                return await self.wait()
        except TimeoutError:
            self.kill()
            return await self.wait()

    def last_lines(self, count: int) -> list[str]:
        """The last lines that this start of the process wrote."""
        return last_lines(self.log_file, count, self._log_start)

    def _end_group(self) -> None:
        """Once: after the process was waited for, its number may belong to somebody else."""
        if self._group_ended:
            return
        self._group_ended = self.exit_status is not None
        with suppress(ProcessLookupError, PermissionError):  # nobody is left in it
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._guard is not None and self._group_ended:
            self._guard.take_back(self._process.pid)


def last_lines(path: Path, count: int, start: int = 0) -> list[str]:
    """The last `count` non-empty lines of a log from byte `start` on."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start, end - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    lines = [line.rstrip() for line in text.replace("\r", "\n").splitlines()]
    return [line for line in lines if line][-count:]
