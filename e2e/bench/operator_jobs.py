"""`e2e/bench/run operator`: the operator with many jobs on a real API server, whose pods have no
containers.

etcd and kube-apiserver run on loopback; the operator is a process of its own, started as a pod
would start it. Jobs are created as fast as the server accepts them; every pod is reported as
running as soon as it exists. Measured from the first job until all are Running:

- the duration of a reconcile by the operator's own histogram, waiting for the API server included;
- the peak of the operator's resident memory, sampled every second;
- writes per job: every write but the creation of the job's own children and of Events, which are
  counted apart: status, applies of existing children, deletions, failed attempts included. The
  lease belongs to no job;
- writes of a quiet resync: of two rounds in which every job is reconciled and nothing has changed.
"""

import argparse
import asyncio
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

from bench.api_server import ApiServer, api_server, missing_binary
from bench.hollow_pods import HollowPods
from bench.report import Report, Row, Value, at_most, progress
from crd import crd_definition
from pipelinerl_cli.up.placement import Ports
from pipelinerl_common.errors import FatalError
from pipelinerl_operator.kube import Object, Resource, open_api
from pipelinerl_operator.kube.errors import NotFound
from pipelinerl_operator.kube.resources import JOBS

TITLE = "Operator with many jobs on a real API server"
CRDS = Resource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition"
)
CHILDREN_PER_JOB = 10
"""ServiceAccount, ConfigMap, Service, NetworkPolicy, two budgets, Secret, three pods."""
RESYNC_S = 20.0
SCRAPE_S = 5
"""Prometheus scrapes every 15 s, as the chart sets it. The response for a thousand jobs is 2 MB and
costs the operator time.
"""
DEADLINE_S = 1800.0
AT_ONCE = 16
"""Jobs that are being created concurrently."""
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""The operator's environment, as the chart sets it."""
WRITES = ("patch", "apply", "delete")
Condition = Callable[[dict[str, float]], bool]


@dataclass
class Operator:
    """The operator's process and its metrics."""

    process: subprocess.Popen[bytes]
    address: str
    log: Path
    peak_bytes: int = 0

    async def metrics(self, session: aiohttp.ClientSession) -> dict[str, float]:
        """Series by name and labels, for example 'operator_jobs{phase="Running"}'."""
        async with session.get(f"http://{self.address}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        series = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {_plain(name): float(value) for name, value in series}

    def last_lines(self) -> str:
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:])

    def sample(self) -> None:
        """Samples the process's memory. Raises FatalError when it has ended."""
        if self.process.poll() is not None:
            raise FatalError(
                f"the operator ended with status {self.process.returncode}:\n{self.last_lines()}"
            )
        resident = int(psutil.Process(self.process.pid).memory_info().rss)
        self.peak_bytes = max(self.peak_bytes, resident)


def bench(args: argparse.Namespace) -> Report:
    """Measures the operator with `args.jobs` jobs."""
    if missing := missing_binary():
        return Report(TITLE, skipped=f"No API server can be started here: {missing} is missing.")
    jobs = 20 if args.quick else args.jobs
    with api_server() as server, Ports() as ports:
        return asyncio.run(_measure(server, ports, jobs))


async def _measure(server: ApiServer, ports: Ports, jobs: int) -> Report:
    async with open_api(server.administrator) as api, aiohttp.ClientSession() as session:
        await api.create(CRDS, "", crd_definition())
        await _until_served(server)
        operator = _start(server, ports)
        driving = asyncio.create_task(HollowPods(api).run())
        try:
            await _until(
                operator, session, lambda series: series.get("operator_leader", 0.0) == 1.0
            )
            progress(f"{jobs} jobs are created")
            started = time.monotonic()
            turns = asyncio.Semaphore(AT_ONCE)

            async def submit(number: int) -> None:
                async with turns:
                    await api.create(JOBS, "default", _job(number))

            await asyncio.gather(*(submit(number) for number in range(jobs)))
            submitted_s = time.monotonic() - started
            progress(f"all were accepted after {submitted_s:.0f} s")
            steady = await _until(
                operator,
                session,
                lambda series: series.get('operator_jobs{phase="Running"}', 0) >= jobs,
            )
            settled_s = time.monotonic() - started
            progress(f"all run after {settled_s:.0f} s; two quiet rounds")
            quiet = await _quiet_rounds(operator, session, jobs)
        finally:
            driving.cancel()
            operator.process.terminate()
            with suppress(asyncio.CancelledError):
                await driving
            await asyncio.to_thread(operator.process.wait, 30)
    return _report(jobs, steady, quiet, settled_s, operator.peak_bytes)


async def _until(
    operator: Operator, session: aiohttp.ClientSession, holds: Condition
) -> dict[str, float]:
    """Waits until `holds` is true of the operator's series and returns them; samples its memory
    meanwhile. Raises FatalError after DEADLINE_S.
    """
    deadline = time.monotonic() + DEADLINE_S
    for second in itertools.count():
        operator.sample()
        if second % SCRAPE_S == 0:
            with suppress(aiohttp.ClientError):
                series = await operator.metrics(session)
                if holds(series):
                    return series
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(1.0)
    raise FatalError(
        f"not steady within {DEADLINE_S:g} s; the operator's last lines:\n{operator.last_lines()}"
    )


async def _quiet_rounds(
    operator: Operator, session: aiohttp.ClientSession, jobs: int
) -> dict[str, float]:
    """The increase of each series over two resyncs, once pending writes are done."""
    await asyncio.sleep(10.0)
    before = await operator.metrics(session)
    looked = _sum(before, "operator_reconciles_total") + 2 * jobs
    after = await _until(
        operator, session, lambda series: _sum(series, "operator_reconciles_total") >= looked
    )
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def _report(
    jobs: int, steady: dict[str, float], quiet: dict[str, float], settled_s: float, peak_bytes: int
) -> Report:
    writes = sum(_sum(steady, "operator_api_requests_total", f'verb="{verb}"') for verb in WRITES)
    creates = _sum(steady, "operator_api_requests_total", 'verb="create"')
    events = max(0.0, creates - CHILDREN_PER_JOB * jobs)
    quiet_writes = sum(
        _sum(quiet, "operator_api_requests_total", f'verb="{verb}"') for verb in (*WRITES, "create")
    )
    p50, p99 = (_quantile(steady, share) for share in (0.5, 0.99))
    values: dict[str, Value] = {
        "jobs": jobs,
        "seconds_until_all_run": round(settled_s, 1),
        "reconciles": _sum(steady, "operator_reconciles_total"),
        "reconcile_p50_seconds": round(p50, 4),
        "reconcile_p99_seconds": round(p99, 4),
        "peak_memory_mib": round(peak_bytes / (1 << 20), 1),
        "writes_per_job": round(writes / jobs, 3),
        "events_per_job": round(events / jobs, 3),
        "quiet_resync_reconciles": _sum(quiet, "operator_reconciles_total"),
        "quiet_resync_writes": quiet_writes,
        "retried_reconciles": _sum(steady, "operator_reconciles_total", 'outcome="retried"'),
        "failed_reconciles": _sum(steady, "operator_reconciles_total", 'outcome="failed"'),
    }
    rows = (
        Row("jobs", str(jobs)),
        Row("seconds until all run", f"{settled_s:.0f}"),
        at_most("reconcile, 99th percentile, seconds", p99, 1.0),
        at_most("peak memory of the operator, MiB", peak_bytes / (1 << 20), 100.0),
        at_most("writes per job beyond its children", writes / jobs, 1.2),
        at_most("writes of two quiet resyncs", quiet_writes, 0),
        Row("events per job", f"{events / jobs:.2f}"),
    )
    return Report(TITLE, values, rows)


def _job(number: int) -> Object:
    """The smallest job that has every role."""
    return {
        "apiVersion": JOBS.api_version,
        "kind": JOBS.kind,
        "metadata": {"name": f"job-{number}", "namespace": "default"},
        "spec": {
            "model": {"uri": "tiny://arithmetic?digits=1", "dtype": "float32", "maxModelLen": 64},
            "task": {
                "path": "pipelinerl_actor.tasks.arithmetic:Arithmetic",
                "sampling": {"maxTokens": 4},
            },
            "weightTransfer": {"backend": "gloo"},
        },
    }


def _start(server: ApiServer, ports: Ports) -> Operator:
    service_account, environment = server.service_account()
    address = ports.address()
    log_file = server.folder / "operator.log"
    with log_file.open("wb") as log:
        flags = {
            "--service-account": str(service_account),
            "--coordinator": "operator:50052",
            "--coordinator-listen": ports.address(),
            "--metrics-listen": address,
            "--nats-url": "nats://nats:4222",
            "--actor-image": "actor:1",
            "--trainer-image": "trainer:1",
            "--preprocessor-image": "preprocessor:1",
            "--resync-seconds": f"{RESYNC_S:g}",
            "--log-level": "warning",
        }
        command = [
            sys.executable,
            "-m",
            "pipelinerl_operator",
            *(part for pair in flags.items() for part in pair),
        ]
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **MALLOC, **environment},
        )
    return Operator(process, address, log_file)


async def _until_served(server: ApiServer) -> None:
    """Waits until the API server serves the new kind."""
    async with open_api(server.administrator) as api:
        for _ in range(100):
            with suppress(NotFound):
                await api.get(JOBS, "default", "")
                return
            await asyncio.sleep(0.2)
    raise FatalError("the API server does not serve the new kind")


def _plain(name: str) -> str:
    """The name of a series without the prefix and the labels that are the same everywhere."""
    bare, brace, labels = name.partition("{")
    kept = [
        label
        for label in labels.rstrip("}").split(",")
        if label and not label.startswith(("job=", "role="))
    ]
    return bare.removeprefix("pipelinerl_") + (brace + ",".join(kept) + "}" if kept else "")


def _sum(series: dict[str, float], name: str, label: str = "") -> float:
    return sum(
        value for key, value in series.items() if key.partition("{")[0] == name and label in key
    )


def _quantile(series: dict[str, float], share: float) -> float:
    """A quantile of the reconcile histogram, linear within its bucket as Prometheus computes it."""
    prefix = 'operator_reconcile_seconds_bucket{le="'
    buckets = sorted(
        (float(key[len(prefix) :].rstrip('"}')), value)
        for key, value in series.items()
        if key.startswith(prefix)
    )
    total = buckets[-1][1]
    below, count_below = 0.0, 0.0
    for bound, count in buckets:
        if count >= share * total and count > count_below:
            inside = (share * total - count_below) / (count - count_below)
            return bound if bound == float("inf") else below + inside * (bound - below)
        below, count_below = bound, count
    return below
