"""Puts one rank together: the event loop with its servers and clients, and the training thread
beside it.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from pipelinerl.v1 import policy_pb2_grpc
from pipelinerl_common import rpc
from pipelinerl_common.metrics import TRAINER, Metrics, serve_metrics
from pipelinerl_common.service import run_until_first
from pipelinerl_common.sinks.process import SinkProcess
from pipelinerl_common.stream import Login
from pipelinerl_common.telemetry import memory_bytes
from pipelinerl_common.tracing import open_tracer
from pipelinerl_trainer.assembly import Run, train
from pipelinerl_trainer.batches import BatchesClient
from pipelinerl_trainer.bridge import Bridge
from pipelinerl_trainer.loop import Desk
from pipelinerl_trainer.membership import FULL_NAME, Membership, PolicyServicer
from pipelinerl_trainer.publisher import Publisher
from pipelinerl_trainer.report import Reporter

log = logging.getLogger(__name__)

Result = TypeVar("Result")

TRANSFER_END_S, METRICS_END_S = 20.0, 5.0
"""Time at the end for a transfer that is under way, and for the last metrics."""


async def run_rank(run: Run, stop: asyncio.Event) -> None:
    """One rank from start to end. Raises SettingsError, or another error when the rank must be
    restarted.
    """
    bridge = Bridge()
    forwarding = asyncio.create_task(_forward(stop, bridge), name="stop")
    try:
        async with rpc.connect(run.wiring.preprocessor, token=run.wiring.token) as channel:
            client = BatchesClient(channel, run.place.data_rank, run.place.num_data_ranks)
            if run.place.rank == 0:
                await _run_leader(run, bridge, client)
            else:
                async with _serve_memory(run):
                    await in_thread(partial(train, run, bridge, client, None))
    finally:
        forwarding.cancel()


@asynccontextmanager
async def _serve_memory(run: Run) -> AsyncIterator[None]:
    """Metrics are rank 0's, for all; the first rank of another node tells no more than its own
    memory.
    """
    metrics = Metrics(TRAINER, run.job.name)
    metrics.gauge("memory_bytes").read(memory_bytes)
    async with serve_metrics(
        run.wiring.metrics_listen if run.place.local_rank == 0 else "", metrics.exposition
    ):
        yield


async def _run_leader(run: Run, bridge: Bridge, client: BatchesClient) -> None:
    async with (
        _membership(run) as membership,
        rpc.connect(run.wiring.coordinator, token=run.wiring.token) as channel,
    ):
        publisher = Publisher(
            channel,
            client.mark_published,
            client.may_publish,
            timeout_s=run.job.spec.weight_transfer.sync_timeout_seconds,
            may_roll_back=run.resume,
        )
        membership.on_change = publisher.wake
        metrics = Metrics(TRAINER, run.job.name)
        reporter = Reporter(metrics, run.wiring.name, run.job.metadata.namespace)
        publisher.on_status = reporter.published
        servicer = PolicyServicer(membership)
        service = rpc.RpcService(policy_pb2_grpc.add_PolicyServicer_to_server, servicer, FULL_NAME)
        async with (
            serve_metrics(run.wiring.metrics_listen, metrics.exposition),
            open_tracer(run.job, TRAINER, run.wiring.name) as tracer,
            rpc.serve(run.wiring.listen, [service], token=run.wiring.token) as server,
        ):
            log.info("serving=%s", server.address)
            publisher.tracer = tracer
            desk = Desk(publisher, reporter, servicer, tracer)
            sinks = SinkProcess(run.job.spec.telemetry.sinks, run.wiring, metrics)
            await run_until_first(
                _train_as_leader(run, bridge, client, desk, sinks),
                publisher.run(membership),
                sinks.run(),
                reporter.run(run.wiring.nats_url, run.job.spec.stream, Login.of(run.wiring)),
            )


async def _train_as_leader(
    run: Run, bridge: Bridge, client: BatchesClient, desk: Desk, sinks: SinkProcess
) -> None:
    """The clock: training, then what is still on its way."""
    await in_thread(partial(train, run, bridge, client, desk))
    await desk.publisher.finish(TRANSFER_END_S)
    await desk.reporter.finish(METRICS_END_S)
    if run.last_metrics is not None:
        desk.reporter.write_last(run.last_metrics)
    await sinks.finish()


@asynccontextmanager
async def _membership(run: Run) -> AsyncIterator[Membership]:
    membership = Membership(run.advertised_address)
    try:
        yield membership
    finally:
        await membership.close()


async def in_thread(function: Callable[[], Result]) -> Result:
    """Runs `function` in a daemon thread: a rank that hangs in a collective must not keep its
    process from ending.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(act: Callable[[], None]) -> None:
        if not future.done():
            act()

    def work() -> None:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - crosses threads; raised again where it is awaited
            outcome = partial(future.set_exception, error)
        else:
            outcome = partial(future.set_result, result)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=work, name="training", daemon=True).start()
    return await future


async def _forward(stop: asyncio.Event, bridge: Bridge) -> None:
    await stop.wait()
    bridge.stop()
