"""The run's own nats-server: restarted on the same port and store when it ends, and when its disk
was full.

A server whose write has failed stores nothing more in that stream, however much room there is
afterwards.
"""

import asyncio
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from pipelinerl_cli.up.orphans import tethered
from pipelinerl_cli.up.process import last_lines
from pipelinerl_cli.up.supervisor import LAST_LINES, ProcessFailure, RestartBudget
from pipelinerl_common.errors import PipelineRLError
from pipelinerl_common.stream import NatsServer

log = logging.getLogger(__name__)

NAME = "nats"
LOOK_S = 2.0
FULL = b"no space left on device"
MIN_FREE_BYTES = 64 << 20
"""Free space that makes a new start worth while."""


class NatsServerProcess:
    """The nats-server of one run, kept running."""

    def __init__(
        self, store: Path, port: int, token: str, on_restart: Callable[[str], None]
    ) -> None:
        self.url = f"nats://127.0.0.1:{port}"
        self.ready = asyncio.Event()
        self.pid: int | None = None
        self._store = store
        self._port = port
        self._token = token
        self._on_restart = on_restart
        self._budget = RestartBudget()
        self._log_read = 0

    async def run(self) -> ProcessFailure:
        """Keeps the server running until cancelled, which stops it. Returns when it cannot be kept
        running.
        """
        while True:
            reason = await self._serve()
            delay = self._budget.spend(asyncio.get_running_loop().time())
            if delay is None or not self.ready.is_set():
                lines = last_lines(self._store / "nats-server.log", LAST_LINES)
                return ProcessFailure(NAME, reason, lines)
            self._on_restart(NAME)
            log.warning("nats %s; starts again in %g s", reason, delay)
            await asyncio.sleep(delay)

    async def _serve(self) -> str:
        """Runs one server to its end; returns why it ended."""
        try:
            async with NatsServer.start(
                self._store, self._port, self._token, launcher=tethered(())
            ) as server:
                self.pid = server.pid
                self.ready.set()
                return await self._until_end(server)
        except PipelineRLError as error:
            return f"cannot be started: {error}"

    async def _until_end(self, server: NatsServer) -> str:
        """Returns why the server has ended, or must be ended."""
        ended = asyncio.create_task(server.wait())
        is_full = False
        try:
            while not (await asyncio.wait({ended}, timeout=LOOK_S))[0]:
                if self._reports_full(server.log_file) and not is_full:
                    is_full = True
                    log.warning(
                        "nats cannot write, the disk under %s is full: free some, the run resumes "
                        "then",
                        self._store,
                    )
                if is_full and shutil.disk_usage(self._store).free >= MIN_FREE_BYTES:
                    return "had a full disk"
            return f"ended with status {ended.result()}"
        finally:
            ended.cancel()

    def _reports_full(self, log_file: Path) -> bool:
        """Whether the log's new lines report a full disk."""
        with log_file.open("rb") as file:
            file.seek(self._log_read)
            news = file.read()
        self._log_read += len(news)
        return FULL in news
