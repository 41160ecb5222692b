"""What rolling a task out needs, put together once for training and for evaluation: generators,
verifier, chat template.

Puts one actor together from its job and its wiring, and runs it.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from pipelinerl_actor.models.chat import Continuation
from pipelinerl_actor.rollout.generator_client import RolloutClient
from pipelinerl_actor.rollout.generators import Generators, LoadWatch
from pipelinerl_actor.rollout.group import GroupRoller
from pipelinerl_actor.rollout.lease_client import LeaseClient, LeaseReports
from pipelinerl_actor.rollout.loop import RolloutLoop, Slots
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
class Pool:
    """Which generators there are, and the model that they serve."""

    urls: Sequence[str]
    """Base URLs, for example "http://127.0.0.1:8000"."""
    model: Path
    """Folder with the model's tokenizer and chat template."""
    max_running: int
    """Most sequences at once on each."""
    token: str | None = None


@dataclass(frozen=True, slots=True)
class Rollouts:
    clients: Sequence[RolloutClient]
    generators: Generators
    roller: GroupRoller


@asynccontextmanager
async def open_rollouts(
    job: str, task: Task, settings: TaskSettings, seed: int, pool: Pool, meter: RolloutMeter
) -> AsyncIterator[Rollouts]:
    """Connections and the verifier's processes end with the block. `task` is what `settings` and
    `seed` make.
    """
    async with AsyncExitStack() as stack:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        )
        clients = [RolloutClient(url, session, pool.token) for url in pool.urls]
        generators = Generators(
            clients, max_running=pool.max_running, max_retries=settings.max_retries, meter=meter
        )
        name = TaskName(settings.path, settings.args, seed)
        verifier = Verifier(
            task,
            name,
            timeout_s=settings.verifier_timeout_seconds,
            max_retries=settings.max_retries,
        )
        stack.push_async_callback(verifier.close)
        sampler = Sampler(generators, settings.sampling, verifier, Continuation(pool.model), seed)
        yield Rollouts(clients, generators, GroupRoller(job, task, settings, sampler, meter))


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
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(
            serve_metrics(wiring.metrics_listen, meter.metrics.exposition)
        )
        tracer = await stack.enter_async_context(open_tracer(job, ACTOR, wiring.name))
        pool = Pool(
            wiring.generators,
            wiring.output / MODEL,
            spec.actors.generator.max_running_requests,
            token,
        )
        rollouts = await stack.enter_async_context(
            open_rollouts(job.name, task, spec.task, spec.seed, pool, meter)
        )
        generators = rollouts.generators
        channel = await stack.enter_async_context(rpc.connect(wiring.preprocessor, token=token))
        samples = await stack.enter_async_context(
            stream.connect(
                wiring.nats_url,
                job.name,
                spec.stream,
                name=wiring.name,
                namespace=job.metadata.namespace,
                login=stream.Login.of(wiring),
            )
        )
        reports = LeaseReports(channel, wiring.name)
        slots = Slots(lambda: generators.num_serving_slots, spec.task.group_size)
        loop = RolloutLoop(
            LeaseClient(channel, wiring.name),
            reports,
            rollouts.roller,
            samples,
            meter,
            slots,
            tracer,
        )
        load = LoadWatch(rollouts.clients, generators, reports)
        metrics = MetricsReport(
            meter,
            samples,
            instance=wiring.name,
            num_running=lambda: generators.num_running,
            num_slots=generators.num_slots,
        )
        await generators.look()
        leasing = loop.run(stop, spec.actors.drain_seconds)
        try:
            await run_until_first(
                leasing, generators.watch(), reports.run(), load.run(), metrics.run()
            )
        finally:
            await metrics.publish_last()  # why it ended may be in the last second's
