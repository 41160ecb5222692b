"""One run of the stream bench: a fresh server, a consumer and a producer process, and what all
three cost.
"""

import asyncio
import json
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from bench import children
from bench.trajectories import Workload
from pipelinerl_common.errors import Unavailable
from pipelinerl_common.stream.server import NatsServer

READY_TIMEOUT_S, RUN_TIMEOUT_S = 60.0, 300.0


@dataclass(frozen=True)
class Run:
    """CPU is of producer, consumer and server together; tokens are those of whole trajectories,
    prompts included.
    """

    seconds: float
    cpu_seconds: float
    producer_cpu_seconds: float
    consumer_cpu_seconds: float
    server_cpu_seconds: float
    num_samples: int
    num_tokens: int
    payload_bytes: int

    @property
    def samples_per_second(self) -> float:
        return self.num_samples / self.seconds

    @property
    def cpu_us_per_token(self) -> float:
        return 1e6 * self.cpu_seconds / self.num_tokens

    @property
    def bytes_per_token(self) -> float:
        return self.payload_bytes / self.num_tokens


@dataclass(frozen=True)
class Measurement:
    """What one role saw between its start and its end. Times are of the monotonic clock, which all
    processes share.
    """

    started: float
    ended: float
    cpu_seconds: float
    num_samples: int
    num_tokens: int
    payload_bytes: int = 0


async def run(transport: str, workload: Workload) -> Run:
    """Moves the workload once over "jetstream" or "redis". Raises Unavailable when a process fails
    or samples are lost.
    """
    with tempfile.TemporaryDirectory(prefix="pipelinerl-bench-") as folder:
        async with (
            SERVERS[transport](Path(folder)) as server,
            _role("consume", transport, server.port, workload) as consumer,
            _role("produce", transport, server.port, workload) as producer,
        ):
            before = children.cpu_seconds(server.pid)
            consumer.start()
            producer.start()
            produced, consumed = await asyncio.gather(producer.result(), consumer.result())
            server_cpu = children.cpu_seconds(server.pid) - before
    if (produced.num_samples, produced.num_tokens) != (consumed.num_samples, consumed.num_tokens):
        raise Unavailable(
            f"{transport}: {produced.num_samples} samples were written and {consumed.num_samples} "
            "read"
        )
    return Run(
        seconds=consumed.ended - produced.started,
        cpu_seconds=produced.cpu_seconds + consumed.cpu_seconds + server_cpu,
        producer_cpu_seconds=produced.cpu_seconds,
        consumer_cpu_seconds=consumed.cpu_seconds,
        server_cpu_seconds=server_cpu,
        num_samples=consumed.num_samples,
        num_tokens=consumed.num_tokens,
        payload_bytes=produced.payload_bytes,
    )


class Server(NamedTuple):
    pid: int
    port: int


@asynccontextmanager
async def _nats(folder: Path) -> AsyncIterator[Server]:
    """The product's server with its file storage in `folder`."""
    async with NatsServer.start(folder) as server:
        yield Server(server.pid, server.port)


@asynccontextmanager
async def _redis(folder: Path) -> AsyncIterator[Server]:
    """Redis as the reference system runs it, in memory alone."""
    port = children.free_port()
    argv = [
        "redis-server",
        "--bind",
        "127.0.0.1",
        "--port",
        str(port),
        "--dir",
        str(folder),
        "--save",
        "",
        "--appendonly",
        "no",
    ]
    async with children.server(argv, port, folder / "redis.log") as process:
        yield Server(process.pid, port)


SERVERS: dict[str, Callable[[Path], AbstractAsyncContextManager[Server]]] = {
    "jetstream": _nats,
    "redis": _redis,
}


@dataclass(frozen=True)
class _Role:
    name: str
    process: Process

    def start(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")

    async def result(self) -> Measurement:
        return Measurement(**json.loads(await self.line(RUN_TIMEOUT_S)))

    async def line(self, timeout_s: float) -> bytes:
        assert self.process.stdout is not None
        async with asyncio.timeout(timeout_s):
            line = await self.process.stdout.readline()
        if not line:
            raise Unavailable(
                f"the {self.name} ended with status {await self.process.wait()}; its error is above"
            )
        return line


@asynccontextmanager
async def _role(role: str, transport: str, port: int, workload: Workload) -> AsyncIterator[_Role]:
    """A child process (see stream_roles) that has prepared itself and waits to be started."""
    arguments = [role, transport, str(port), json.dumps(asdict(workload))]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench.stream_roles",
        *arguments,
        stdin=PIPE,
        stdout=PIPE,
    )
    try:
        ready = _Role(f"{transport} {role}r", process)
        await ready.line(READY_TIMEOUT_S)
        yield ready
    finally:
        await children.stop(process)
