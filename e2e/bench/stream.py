"""`e2e/bench/run stream`: samples from an actor's process to the preprocessor's, against the
reference system's Redis and pickle.

Ours is the product's path: common.codec and common.stream on a real nats-server with file storage,
every publication and every delivery acknowledged. Both sides move the same trajectories between two
processes (see `stream_roles`) through one server process, in turn, several times; ratios are taken
per round and their median counts.
"""

import argparse
import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil

from bench.processes import Worker, cpu_seconds, server
from bench.report import Report, Row, Value, at_least, at_most, progress
from bench.trajectories import Workload
from pipelinerl_cli.up.placement import Ports
from pipelinerl_common.errors import Unavailable
from pipelinerl_common.stream.server import NatsServer

TITLE = "Sample stream against Redis + pickle"
NO_REDIS = (
    "redis-server is not installed, so there is no baseline: install Debian's package "
    "redis-server and run the bench again."
)
DISTINCT_GROUPS = 32
READY_TIMEOUT_S, RUN_TIMEOUT_S = 60.0, 300.0


@dataclass(frozen=True)
class Run:
    """One transfer of the whole workload. CPU time is that of producer, consumer and server
    together; tokens are those of whole trajectories, prompts included.
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
    """The measurement of one role between its start and its end. Times are of the monotonic clock,
    which all processes share.
    """

    started: float
    ended: float
    cpu_seconds: float
    num_samples: int
    num_tokens: int
    payload_bytes: int = 0


def bench(args: argparse.Namespace) -> Report:
    """Runs the bench; skipped where no redis-server is installed."""
    if shutil.which("redis-server") is None:
        return Report(TITLE, skipped=NO_REDIS)
    num_groups, num_rounds = (100, 1) if args.quick else (args.groups, args.rounds)
    workload = Workload(
        num_groups, DISTINCT_GROUPS, args.group_size, args.median_tokens, args.max_tokens, args.seed
    )
    ours, baseline = asyncio.run(_rounds(workload, num_rounds))
    return _report(ours, baseline)


async def _rounds(workload: Workload, num_rounds: int) -> tuple[list[Run], list[Run]]:
    ours, baseline = [], []
    for number in range(num_rounds):
        ours.append(await run("jetstream", workload))
        baseline.append(await run("redis", workload))
        rates = (
            f"{ours[-1].samples_per_second:.0f} against {baseline[-1].samples_per_second:.0f} "
            "samples/s"
        )
        progress(f"round {number + 1} of {num_rounds}: {rates}")
    return ours, baseline


def _report(ours: list[Run], baseline: list[Run]) -> Report:
    speed = median(
        a.samples_per_second / b.samples_per_second for a, b in zip(ours, baseline, strict=True)
    )
    cpu = median(
        a.cpu_us_per_token / b.cpu_us_per_token for a, b in zip(ours, baseline, strict=True)
    )
    size = ours[0].bytes_per_token
    values: dict[str, Value] = {
        "samples_per_second_ratio": speed,
        "cpu_per_token_ratio": cpu,
        "bytes_per_token": size,
        "rounds": len(ours),
        "ours": _absolute(ours),
        "baseline": _absolute(baseline),
    }
    rows = [
        at_least("samples per second, ratio", speed, 3.0),
        at_most("CPU per token, ratio", cpu, 0.25),
        at_most("payload bytes per token", size, 12.0, f"{baseline[0].bytes_per_token:.3g}"),
    ]
    rows += [
        Row(name.replace("_", " "), f"{of(ours):.4g}", f"{of(baseline):.4g}")
        for name, of in ABSOLUTES.items()
    ]
    return Report(TITLE, values, tuple(rows))


ABSOLUTES: dict[str, Callable[[list[Run]], float]] = {
    "samples_per_second": lambda runs: median(run.samples_per_second for run in runs),
    "tokens_per_second": lambda runs: median(run.num_tokens / run.seconds for run in runs),
    "cpu_us_per_token": lambda runs: median(run.cpu_us_per_token for run in runs),
    "producer_cpu_seconds": lambda runs: median(run.producer_cpu_seconds for run in runs),
    "consumer_cpu_seconds": lambda runs: median(run.consumer_cpu_seconds for run in runs),
    "server_cpu_seconds": lambda runs: median(run.server_cpu_seconds for run in runs),
    "seconds": lambda runs: median(run.seconds for run in runs),
    "bytes_per_token": lambda runs: runs[0].bytes_per_token,
    "num_samples": lambda runs: runs[0].num_samples,
    "num_tokens": lambda runs: runs[0].num_tokens,
}


def _absolute(runs: list[Run]) -> dict[str, Value]:
    return {name: of(runs) for name, of in ABSOLUTES.items()}


async def run(transport: str, workload: Workload) -> Run:
    """Moves the workload once over "jetstream" or "redis". Raises Unavailable when a process fails
    or samples are lost.
    """
    with tempfile.TemporaryDirectory(prefix="pipelinerl-bench-") as folder:
        async with (
            SERVERS[transport](Path(folder)) as (pid, port),
            _role("consume", transport, port, workload) as consumer,
            _role("produce", transport, port, workload) as producer,
        ):
            process = psutil.Process(pid)
            before = cpu_seconds(process)
            consumer.go()
            producer.go()
            produced, consumed = await asyncio.gather(_result(producer), _result(consumer))
            server_cpu = cpu_seconds(process) - before
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


@asynccontextmanager
async def _role(role: str, transport: str, port: int, workload: Workload) -> AsyncIterator[Worker]:
    """A worker (see stream_roles) that has prepared itself and waits to be started."""
    arguments = (role, transport, str(port), json.dumps(asdict(workload)))
    async with Worker.start(f"{transport} {role}r", "bench.stream_roles", *arguments) as worker:
        await worker.line(READY_TIMEOUT_S)
        yield worker


async def _result(worker: Worker) -> Measurement:
    return Measurement(**json.loads(await worker.line(RUN_TIMEOUT_S)))


class Address(NamedTuple):
    """A running server's process and port."""

    pid: int
    port: int


@asynccontextmanager
async def _nats(folder: Path) -> AsyncIterator[Address]:
    """The product's server with its file storage in `folder`."""
    async with NatsServer.start(folder) as nats:
        yield Address(nats.pid, nats.port)


@asynccontextmanager
async def _redis(folder: Path) -> AsyncIterator[Address]:
    """Redis as the reference system runs it, in memory alone."""
    with Ports() as ports:
        port = ports.reserve()
        argv = (
            *("redis-server", "--bind", "127.0.0.1", "--port", str(port)),
            *("--dir", str(folder), "--save", "", "--appendonly", "no"),
        )
        async with server(argv, port, folder / "redis.log") as process:
            yield Address(process.pid, port)


SERVERS: dict[str, Callable[[Path], AbstractAsyncContextManager[Address]]] = {
    "jetstream": _nats,
    "redis": _redis,
}
