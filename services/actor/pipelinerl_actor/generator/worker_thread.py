"""Work on a thread of an engine's worker, beside the decode, and the report of its end to the
generator's process.

Workers may be other processes. They report over a socket in a private folder instead of being
polled through the engine: every poll would interrupt the decode, and keep idle workers busy waiting
for the next one.
"""

import asyncio
import itertools
import json
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelinerl_weights.errors import TransferAborted, TransferFailed, TransferTimeout

Outcome = dict[str, Any]
"""{"result": {...}} or {"failure": type name, "message": ...}, as JSON between processes."""

FAILURES: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (TransferAborted, TransferTimeout, TransferFailed, RuntimeError)
}
_SEND_S = 10.0


@dataclass(frozen=True, slots=True)
class Ticket:
    """Identifies one piece of work that every worker does, and where to report its end."""

    number: int
    socket: str


class WorkerReports:
    """The generator's side: receives the outcomes of the workers' background work."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._numbers = itertools.count()
        self._outcomes: dict[int, dict[int, Outcome]] = {}
        self._changed = asyncio.Condition()
        self._path = ""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        with tempfile.TemporaryDirectory(prefix="pipelinerl-") as folder:
            self._path = str(Path(folder) / "reports")
            server = await asyncio.start_unix_server(self._receive, self._path)
            try:
                yield
            finally:
                server.close()

    async def collect(
        self, start: Callable[[Ticket], Awaitable[object]], timeout_s: float
    ) -> list[dict[str, Any]]:
        """The results of the work that `start` starts on all workers, in their order. Raises what a
        worker raised, or TimeoutError.
        """
        ticket = Ticket(next(self._numbers), self._path)
        # Registered before the start, since a worker may report before the call returns.
        outcomes = self._outcomes[ticket.number] = {}
        try:
            await start(ticket)
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: len(outcomes) == self._num_workers)
        finally:
            del self._outcomes[ticket.number]
        return result_of([outcomes[worker] for worker in sorted(outcomes)])

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        report = json.loads(await reader.readline())
        writer.close()
        async with self._changed:
            # Reports of work that was given up come late, and are ignored.
            if report["ticket"] in self._outcomes:
                self._outcomes[report["ticket"]][report["worker"]] = report["outcome"]
            self._changed.notify_all()


class BackgroundWork:
    """The worker's side: runs functions one at a time and reports how they ended."""

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._busy = False

    def start(self, ticket: Ticket, function: Callable[[], dict[str, Any]]) -> None:
        """Raises RuntimeError while the previous one still runs."""
        if self._busy:
            raise RuntimeError("the previous work has not ended")
        self._busy = True
        threading.Thread(
            target=self._run, args=(ticket, function), name="weights", daemon=True
        ).start()

    def _run(self, ticket: Ticket, function: Callable[[], dict[str, Any]]) -> None:
        outcome: Outcome
        try:
            outcome = {"result": function()}
        except Exception as error:  # noqa: BLE001 - carried to the other process, where `result_of` raises it
            kind = type(error).__name__ if type(error).__name__ in FAILURES else "RuntimeError"
            message = (
                str(error) if kind == type(error).__name__ else f"{type(error).__name__}: {error}"
            )
            outcome = {"failure": kind, "message": message}
        # Before the report: its receiver may start the next work at once.
        self._busy = False
        report = {"ticket": ticket.number, "worker": self._worker, "outcome": outcome}
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_SEND_S)
            connection.connect(ticket.socket)
            connection.sendall(json.dumps(report).encode() + b"\n")


def result_of(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """The results of every worker. Raises the failure that explains most: an abort is only the
    other workers' reaction to it.
    """
    failures = [outcome for outcome in outcomes if "failure" in outcome]
    for failure in sorted(
        failures, key=lambda each: str(each["failure"]) == TransferAborted.__name__
    ):
        raise FAILURES[failure["failure"]](failure["message"])
    return [outcome["result"] for outcome in outcomes]
