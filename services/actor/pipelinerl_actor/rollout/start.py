"""Assembles a rollout loop, or the part of it that evaluation uses too, and runs it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from pipelinerl_actor.models.chat import Continuation
from pipelinerl_actor.rollout.generator_client import RolloutClient
from pipelinerl_actor.rollout.generators import Generators
from pipelinerl_actor.rollout.group import GroupRoller
from pipelinerl_actor.rollout.lease_client import LeaseClient, LeaseReports
from pipelinerl_actor.rollout.loop import RolloutLoop
from pipelinerl_actor.rollout.metrics import MetricsReport, RolloutMeter
from pipelinerl_actor.rollout.trajectory import Sampler
from pipelinerl_actor.rollout.verifier import Verifier
from pipelinerl_actor.task import Task, TaskName
from pipelinerl_actor.task_loader import load_task
from pipelinerl_common import rpc, stream
from pipelinerl_common.checkpoints import MODEL
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.metrics import ACTOR, Metrics, serve_metrics
from pipelinerl_common.service import Wiring, run_until_first
from pipelinerl_common.settings import TaskSettings, load_job
from pipelinerl_common.tracing import open_tracer

_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class GeneratorPool:
    """The addresses of an actor's generators, and the model that they serve."""

    urls: Sequence[str]
    """Base URLs, for example "http://127.0.0.1:8000"."""
    model: Path
    """Folder with the model's tokenizer and chat template."""
    max_running: int
    """Most sequences at once on each."""
    token: str | None = None


@asynccontextmanager
async def open_roller(
    job: str,
    task: Task,
    settings: TaskSettings,
    seed: int,
    pool: GeneratorPool,
    meter: RolloutMeter,
) -> AsyncIterator[tuple[GroupRoller, Generators]]:
    """Rolls out groups of `task`, which `settings` and `seed` make, on the pool's generators. Their
    connections and the verifier's processes end with the block.
    """
    async with AsyncExitStack() as stack:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        )
        generators = Generators(
            [RolloutClient(url, session, pool.token) for url in pool.urls],
            max_running=pool.max_running,
            max_retries=settings.max_retries,
            meter=meter,
        )
        verifier = Verifier(
            task,
            TaskName(settings.path, settings.args, seed),
            timeout_s=settings.verifier_timeout_seconds,
            max_retries=settings.max_retries,
        )
        stack.push_async_callback(verifier.close)
        sampler = Sampler(generators, settings.sampling, verifier, Continuation(pool.model), seed)
        yield GroupRoller(job, task, settings, sampler, meter), generators


async def run_actor(wiring: Wiring, stop: asyncio.Event) -> None:
    """Runs until `stop` is set. Raises SettingsError for a task or wiring that cannot work."""
    job = load_job(wiring.job_file)
    spec, token = job.spec, wiring.token
    if not wiring.generators:
        raise SettingsError(
            "--generator is missing: the rollout loop needs the base URL of at least one"
        )
    if not wiring.preprocessor:
        raise SettingsError("--preprocessor is missing: the rollout loop needs its host:port")
    task = load_task(TaskName(spec.task.path, spec.task.args, spec.seed))
    meter = RolloutMeter(Metrics(ACTOR, job.name))
    max_running = spec.actors.generator.max_running_requests
    pool = GeneratorPool(wiring.generators, wiring.output / MODEL, max_running, token)
    async with (
        serve_metrics(wiring.metrics_listen, meter.metrics.exposition),
        open_tracer(job, ACTOR, wiring.name) as tracer,
        open_roller(job.name, task, spec.task, spec.seed, pool, meter) as (roller, generators),
        rpc.connect(wiring.preprocessor, token=token) as channel,
        stream.connect(
            wiring.nats_url,
            job.name,
            spec.stream,
            name=wiring.name,
            namespace=job.metadata.namespace,
            login=stream.Login.of(wiring),
        ) as samples,
    ):
        reports = LeaseReports(channel, wiring.name)
        leases = LeaseClient(channel, wiring.name)
        loop = RolloutLoop(leases, reports, roller, generators, samples, meter, tracer)
        metrics = MetricsReport(
            meter,
            samples,
            instance=wiring.name,
            num_running=lambda: generators.num_running,
            num_slots=generators.num_slots,
        )
        # Before the loop: without a generator that serves it would not call the preprocessor yet.
        await generators.probe()
        try:
            await run_until_first(
                loop.run(stop, spec.task.group_size, spec.actors.drain_seconds),
                generators.watch(),
                generators.report_loads(reports),
                reports.run(),
                metrics.run(),
            )
        finally:
            # The cause of the end may be among the last second's counts.
            await metrics.publish_last()
