"""`bench stream`: samples from an actor's process to the preprocessor's, against the reference
system's Redis and pickle.

Ours is the product's path: common.codec and common.stream on a real nats-server with file storage,
every publication and every delivery acknowledged. Both sides move the same trajectories between two
processes through one server process, in turn, several times; ratios are taken per round and their
median counts.
"""

import argparse
import asyncio
import shutil
from collections.abc import Callable
from statistics import median

from bench.report import Report, Row, Value, at_least, at_most, progress
from bench.stream_run import Run, run
from bench.trajectories import Workload

TITLE = "Sample stream against Redis + pickle"
NO_REDIS = (
    "redis-server is not installed, so there is no baseline: install Debian's package "
    "redis-server and run the bench again."
)
DISTINCT_GROUPS = 32


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
