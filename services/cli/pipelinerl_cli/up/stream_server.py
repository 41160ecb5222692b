"""The run's own nats-server: started again on the same port and store when it dies."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from pipelinerl_cli.up.process import last_lines, tethered
from pipelinerl_cli.up.restarts import RestartBudget
from pipelinerl_cli.up.supervisor import LAST_LINES, Failure
from pipelinerl_common.errors import PipelineRLError
from pipelinerl_common.stream import NatsServer

log = logging.getLogger(__name__)

NAME = "nats"


class StreamServer:
    def __init__(self, store: Path, port: int, token: str, on_restart: Callable[[str], None]) -> None:
        self.url = f"nats://127.0.0.1:{port}"
        self.ready = asyncio.Event()
        self.pid: int | None = None
        self._store = store
        self._port = port
        self._token = token
        self._on_restart = on_restart
        self._budget = RestartBudget()

    async def run(self) -> Failure:
        """Keeps the server running until cancelled, which stops it. Returns when it cannot be kept running."""
        while True:
            reason = await self._serve()
            delay = self._budget.spend(asyncio.get_running_loop().time())
            if delay is None or not self.ready.is_set():
                return Failure(NAME, reason, last_lines(self._store / "nats-server.log", LAST_LINES))
            self._on_restart(NAME)
            log.warning("nats %s; starts again in %g s", reason, delay)
            await asyncio.sleep(delay)

    async def _serve(self) -> str:
        """One server, to its end; returns why it ended."""
        try:
            async with NatsServer.start(self._store, self._port, self._token, launcher=tethered(())) as server:
                self.pid = server.pid
                self.ready.set()
                return f"ended with status {await server.wait()}"
        except PipelineRLError as error:
            return f"cannot be started: {error}"
