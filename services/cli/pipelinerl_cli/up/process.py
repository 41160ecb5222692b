"""Free ports for the run's processes, held for as long as the run.

A port that was found free and released again may be gone before its process binds it, above all to
an outgoing connection. So each port stays bound here, by a socket that never listens: with
SO_REUSEADDR on both sides Linux lets the process listen on the port too, while it gives the port to
nobody who asks for any free one.

Signals: the first asks for a clean stop, the second for an end at once.

One local process of the run: tethered to this one, in a process group of its own, its output in
a log file.
"""

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from pipelinerl_cli.up.orphans import Guard, tethered
from pipelinerl_common.errors import SettingsError

LOOPBACK = "127.0.0.1"


class Ports:
    """Reserved loopback ports; leaving the context releases them."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> "Ports":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for held in self._sockets:
            held.close()
        self._sockets.clear()

    def reserve(self) -> int:
        """A port that nobody else on this machine has or gets."""
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((LOOPBACK, 0))
        self._sockets.append(held)
        return int(held.getsockname()[1])

    def address(self) -> str:
        """A reserved "host:port"."""
        return f"{LOOPBACK}:{self.reserve()}"


def check_port_is_free(field: str, port: int) -> None:
    """Raises SettingsError when another process listens on the port that the job file asks for."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
            probe.listen(1)
        except OSError as error:
            raise SettingsError(
                f"{field}={port}: the port is occupied ({error.strerror}); end the process that "
                "has it, "
                "choose another port, or 0 for any free one"
            ) from error


class Interrupt:
    """SIGINT, SIGTERM and SIGHUP of this process, as events."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()
        self.first: signal.Signals | None = None

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(each, self.receive, each)

    def receive(self, received: signal.Signals) -> None:
        if self.asked.is_set():
            self.at_once.set()
        self.first = self.first or received
        self.asked.set()


TAIL_BYTES = 16384
LOG_PREFIX = re.compile(r"^\S+Z [A-Z]+ \S+ ")
"""Time, level and process of a log line, which its reader on the display knows."""


class LocalProcess:
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
    ) -> "LocalProcess":
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
