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

from pipelinerl_cli.run_folder import RunFolder
from pipelinerl_cli.up.orphans import Guard, tethered
from pipelinerl_cli.up.placement import environment
from pipelinerl_common.child_process import send_signal
from pipelinerl_common.settings import Job
from pipelinerl_control.plan import PlannedProcess

TAIL_BYTES = 16384
LOG_PREFIX = re.compile(r"^\S+Z [A-Z]+ \S+ ")
"""Time, level and process of a log line, which the display shows elsewhere."""


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
        self.log_file = log_file
        self._log_start = log_start
        self._process = process
        self._guard = guard
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
            start = log.seek(0, os.SEEK_END)
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
        """Waits for the process to end, ends what it left behind in its group, and returns its exit
        status.
        """
        status = await self._process.wait()
        self._end_group()
        return status

    def terminate(self) -> None:
        """Asks the process, not its whole group, to end."""
        if self.exit_status is None and not self._is_asked:
            # Once only: a second signal would cut short the clean end that the first asked for.
            self._is_asked = True
            send_signal(self._process, signal.SIGTERM)

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
        if self._group_ended:
            return
        # Once the process was waited for, its number may belong to another one.
        self._group_ended = self.exit_status is not None
        with suppress(ProcessLookupError, PermissionError):  # the group is empty
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._guard is not None and self._group_ended:
            self._guard.remove(self._process.pid)


class Launcher:
    """Starts the processes of one run, with their share of the machine and a log each. `job` has as
    many actors as there may ever be.
    """

    def __init__(self, job: Job, folder: RunFolder, guard: Guard) -> None:
        self._job = job
        self._folder = folder
        self._guard = guard

    async def launch(self, planned: PlannedProcess) -> LocalProcess:
        return await self.start(planned.name, planned.argv)

    async def start(self, name: str, argv: Sequence[str]) -> LocalProcess:
        return await LocalProcess.start(
            name,
            argv,
            log_file=self._folder.log_file(name),
            environment=environment(self._job, name, os.environ, os.cpu_count() or 1),
            guard=self._guard,
        )


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
