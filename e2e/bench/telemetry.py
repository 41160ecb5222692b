"""`e2e/bench/run telemetry`: the cost of telemetry, as the same run with it and without, in turn.

with      every target scraped once a second, vLLM's own metrics, a tenth of the groups traced
without   no target scraped, vLLM keeps no metrics, nothing is traced

Our own numbers are recorded in both, since the run's own records come from them too. Two things are
compared over the steps after the warm-up: trained tokens per second, which is what counts and
swings with everything else on the machine, and trained tokens per second of CPU time over all
processes of the run, which swings less.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from bench.collector import collecting
from bench.processes import LAST_LINES, cpu_seconds, process_tree, running, tail
from bench.report import Report, Row, at_most, progress
from pipelinerl_cli.up.process import LocalProcess, last_lines
from pipelinerl_common.errors import PipelineRLError, Unavailable
from pipelinerl_common.runs.records import read_records

TARGET = 0.02
WARM_UP_STEPS = 3
QUICK_STEPS = 5
SAMPLE_RATIO = 0.1
RUN_TIMEOUT_S = 1800.0
POLL_S = 0.05
SCRAPE_EVERY_S = 1.0
SCRAPE_TIMEOUT_S = 5.0


@dataclass
class Load:
    """The load of telemetry on the runs that had it."""

    scrapes: int = 0
    """Scrapes that were answered."""
    failed_scrapes: int = 0
    """Unanswered scrapes of a process that answered before and after: it should have served."""
    absent_scrapes: int = 0
    """Unanswered scrapes before a process listened, or after its last answer: targets are listed
    before their processes start.
    """
    bytes: int = 0
    spans: int = 0
    _open: dict[str, int] = field(default_factory=dict)
    """Scrapes that have failed since its last answer, by target that has answered."""

    def answered(self, target: str, num_bytes: int) -> None:
        since = self._open.get(target, 0)
        self._open[target] = 0
        self.scrapes += 1
        self.bytes += num_bytes
        self.failed_scrapes += since
        self.absent_scrapes -= since

    def unanswered(self, target: str) -> None:
        self.absent_scrapes += 1
        if target in self._open:
            self._open[target] += 1

    def end_run(self) -> None:
        """Forgets the targets: the next run's processes are others, maybe at the same addresses."""
        self._open.clear()


@dataclass(frozen=True)
class Measured:
    """Totals of one run over the steps after the warm-up."""

    tokens: float
    seconds: float
    cpu_seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_cpu_second(self) -> float:
        return self.tokens / self.cpu_seconds


def bench(args: argparse.Namespace) -> Report:
    """Runs `args.rounds` pairs of runs of `args.steps` steps."""
    rounds, steps = (1, QUICK_STEPS) if args.quick else (args.rounds, args.steps)
    engine = "transformers" if args.quick else args.engine
    load = Load()
    pairs = asyncio.run(_pairs(rounds, steps, engine, args.seed, load))
    return report(pairs, load)


async def _pairs(
    rounds: int, steps: int, engine: str, seed: int, load: Load
) -> list[tuple[Measured, Measured]]:
    """(without, with) for each round; which comes first changes from round to round."""
    pairs = []
    with (
        tempfile.TemporaryDirectory(prefix="pipelinerl-bench-") as folder,
        collecting() as (endpoint, collector),
    ):
        for number in range(rounds):
            measured: dict[bool, Measured] = {}
            for with_telemetry in (False, True) if number % 2 == 0 else (True, False):
                progress(
                    f"round {number + 1} of {rounds}: {'with' if with_telemetry else 'without'} "
                    "telemetry"
                )
                output = Path(folder) / f"{number}-{'with' if with_telemetry else 'without'}"
                job = _job(engine, steps, seed, endpoint if with_telemetry else None)
                measured[with_telemetry] = await _run(
                    job, output, steps, load if with_telemetry else None
                )
            pairs.append((measured[False], measured[True]))
        load.spans = len(collector.spans)
    return pairs


async def _run(job: dict[str, Any], output: Path, steps: int, load: Load | None) -> Measured:
    job_file = _write_job(output, job)
    argv = ["python", "-m", "pipelinerl_cli", "up", str(job_file), "--output", str(output)]
    log = output.with_suffix(".log")
    try:
        async with AsyncExitStack() as stack, asyncio.timeout(RUN_TIMEOUT_S):
            process = await stack.enter_async_context(running(argv, log))
            if load is not None:
                await stack.enter_async_context(scraping(output / "metrics-targets.json", load))
            began = await _at_step(process, output, WARM_UP_STEPS)
            ended = await _at_step(process, output, steps)
            await process.wait()
    except TimeoutError:
        ending = "\n".join(last_lines(log, LAST_LINES))
        raise Unavailable(f"the run did not end within {RUN_TIMEOUT_S:g} s: {ending}") from None
    return Measured(
        ended.tokens - began.tokens,
        ended.seconds - began.seconds,
        ended.cpu_seconds - began.cpu_seconds,
    )


def _write_job(output: Path, job: dict[str, Any]) -> Path:
    """Writes the job file beside the run's folder."""
    output.mkdir(parents=True)
    job_file = output.with_suffix(".yaml")
    job_file.write_text(yaml.safe_dump(job))
    return job_file


async def _at_step(process: LocalProcess, output: Path, step: int) -> Measured:
    """Tokens trained, time and CPU time up to the moment at which `step` was reported."""
    while True:
        trained = _trained(output / "metrics.jsonl")
        if len(trained) >= step:
            return Measured(
                sum(tokens for _, tokens in trained[:step]),
                trained[step - 1][0],
                sum(map(cpu_seconds, process_tree(process.pid))),
            )
        if process.exit_status is not None:
            raise Unavailable(
                f"the run ended with status {process.exit_status} before step {step}: "
                f"{tail(process)}"
            )
        await asyncio.sleep(POLL_S)


def _trained(path: Path) -> list[tuple[float, float]]:
    """(time, tokens) of each step so far."""
    if not path.exists():
        return []
    try:
        records = [
            record for record in read_records(path) if record.role == "trainer" and record.step >= 0
        ]
    except PipelineRLError:  # a line is being written
        return []
    return [(record.time, record.values["num_trained_tokens"]) for record in records]


def report(pairs: Sequence[tuple[Measured, Measured]], load: Load) -> Report:
    """The medians over the rounds; the spread is that of the rounds."""
    wall = [1 - on.tokens_per_second / off.tokens_per_second for off, on in pairs]
    cpu = [1 - on.tokens_per_cpu_second / off.tokens_per_cpu_second for off, on in pairs]
    off = [each.tokens_per_second for each, _ in pairs]
    noise = (max(off) - min(off)) / statistics.median(off) if len(off) > 1 else 0.0
    values: dict[str, Any] = {
        "rounds": len(pairs),
        "overhead": statistics.median(wall),
        "overhead_min": min(wall),
        "overhead_max": max(wall),
        "cpu_overhead": statistics.median(cpu),
        "cpu_overhead_min": min(cpu),
        "cpu_overhead_max": max(cpu),
        "tokens_per_second_without": statistics.median(off),
        "tokens_per_second_with": statistics.median(each.tokens_per_second for _, each in pairs),
        "noise": noise,
        "scrapes": load.scrapes,
        "failed_scrapes": load.failed_scrapes,
        "absent_scrapes": load.absent_scrapes,
        "bytes_per_scrape": load.bytes / max(load.scrapes, 1),
        "spans": load.spans,
    }
    rows = (
        at_most("throughput lost (median of the rounds)", values["overhead"], TARGET),
        at_most("tokens per CPU second lost", values["cpu_overhead"], TARGET),
        Row("throughput lost, least to most", f"{min(wall):.3f} to {max(wall):.3f}"),
        Row("tokens per CPU second lost, least to most", f"{min(cpu):.3f} to {max(cpu):.3f}"),
        Row(
            "trained tokens per second",
            f"{values['tokens_per_second_with']:,.0f}",
            f"{statistics.median(off):,.0f}",
        ),
        Row("spread of the runs without telemetry", f"{noise:.3f}"),
        Row("scrapes, spans", f"{load.scrapes:,}, {load.spans:,}"),
        Row("scrapes that a process failed to answer", f"{load.failed_scrapes:,}"),
    )
    return Report("telemetry", values, rows)


def _job(engine: str, steps: int, seed: int, endpoint: str | None) -> dict[str, Any]:
    """The arithmetic example; its sequences are short, so there is more to count and to trace per
    token than elsewhere.
    """
    telemetry: dict[str, Any] = {"engineMetrics": endpoint is not None}
    if endpoint is not None:
        telemetry["tracing"] = {"endpoint": endpoint, "sampleRatio": SAMPLE_RATIO}
    return {
        "apiVersion": "pipelinerl.dev/v1alpha1",
        "kind": "PipelineRLJob",
        "metadata": {"name": "bench-telemetry"},
        "spec": {
            "seed": seed,
            "model": {"uri": "tiny://arithmetic?digits=1", "dtype": "float32", "maxModelLen": 64},
            "task": {
                "path": "pipelinerl_actor.tasks.arithmetic:Arithmetic",
                "args": {"digits": 1},
                "groupSize": 8,
                "sampling": {"maxTokens": 4},
            },
            "algorithm": {"steps": steps, "groupsPerStep": 32},
            "actors": {
                "generator": {"engine": engine, "maxRunningRequests": 64, "kvCacheBytes": 1 << 27}
            },
            "trainers": {"zeroStage": 1, "microBatchTokens": 1024, "checkpoint": {"everySteps": 0}},
            "weightTransfer": {"backend": "gloo", "bucketBytes": 1 << 22},
            "telemetry": telemetry,
        },
    }


@asynccontextmanager
async def scraping(targets_file: Path, load: Load) -> AsyncIterator[None]:
    """Reads every target once a second, as Prometheus does, from when the list exists to the end of
    the block.
    """

    async def scrape(session: aiohttp.ClientSession, target: str) -> None:
        try:
            async with session.get(f"http://{target}/metrics") as response:
                load.answered(target, len(await response.read()))
        except (aiohttp.ClientError, TimeoutError):
            load.unanswered(target)

    async def loop() -> None:
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=SCRAPE_TIMEOUT_S)
        ) as session:
            while True:
                await asyncio.gather(
                    *(scrape(session, target) for target in _targets(targets_file))
                )
                await asyncio.sleep(SCRAPE_EVERY_S)

    task = asyncio.create_task(loop())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        load.end_run()


def _targets(file: Path) -> list[str]:
    return [each["targets"][0] for each in json.loads(file.read_text())] if file.exists() else []
