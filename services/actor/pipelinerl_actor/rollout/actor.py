"""Puts one actor together from its job and its wiring, and runs it."""

import asyncio
from contextlib import AsyncExitStack

from pipelinerl_actor.rollout.admission import LeaseDesk, Reports
from pipelinerl_actor.rollout.assembly import Pool, open_rollouts
from pipelinerl_actor.rollout.load import LoadWatch
from pipelinerl_actor.rollout.loop import RolloutLoop, Slots
from pipelinerl_actor.rollout.meter import Meter, MetricsReport
from pipelinerl_actor.task import TaskName
from pipelinerl_actor.task_loader import load_task
from pipelinerl_common import rpc, stream
from pipelinerl_common.checkpoints import MODEL
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.metrics import ACTOR, Metrics, serve_metrics
from pipelinerl_common.service import Wiring, run_until_first
from pipelinerl_common.settings import load_job
from pipelinerl_common.tracing import open_tracer


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
    meter = Meter(Metrics(ACTOR, job.name))
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
        reports = Reports(channel, wiring.name)
        slots = Slots(lambda: generators.num_serving_slots, spec.task.group_size)
        loop = RolloutLoop(
            LeaseDesk(channel, wiring.name), reports, rollouts.roller, samples, meter, slots, tracer
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
