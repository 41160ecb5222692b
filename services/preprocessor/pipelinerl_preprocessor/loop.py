"""The preprocessor's loops.

    sample stream --> Intake --> LiveLedger (groups that wait) --> Batches --> trainer ranks
                                     |        ^                       |
                  actors <-- Admission        +---- commit, publish --+
                                     |
                                JournalWriter --> key-value bucket

The clock is the caller's `stop`; everything else runs until then. The services answer calls in
between.
"""

import asyncio
import logging
from contextlib import closing

from pipelinerl.v1.admission_pb2_grpc import add_AdmissionServicer_to_server
from pipelinerl.v1.batches_pb2_grpc import add_BatchesServicer_to_server
from pipelinerl_common.errors import TemporaryError
from pipelinerl_common.metrics import PREPROCESSOR, Metrics, record_of, serve_metrics
from pipelinerl_common.rpc import RpcService, serve
from pipelinerl_common.service import Wiring, run_until_first
from pipelinerl_common.settings import Job
from pipelinerl_common.stream import Login, Stream, connect
from pipelinerl_common.tracing import open_tracer
from pipelinerl_preprocessor.admission import Admission, ClosedTime
from pipelinerl_preprocessor.batches import Batches
from pipelinerl_preprocessor.drops import DropReason
from pipelinerl_preprocessor.events import EventLog
from pipelinerl_preprocessor.gauges import Depths
from pipelinerl_preprocessor.intake import Intake
from pipelinerl_preprocessor.live import LiveLedger
from pipelinerl_preprocessor.parts import layout_of, open_ledger, open_reference
from pipelinerl_preprocessor.preparation import Preparation
from pipelinerl_preprocessor.trained import TrainedLog

log = logging.getLogger(__name__)

REPORT_EVERY_S = 1.0
NOTE_EVERY_S = 1.0
NOTES_PER_OBSERVATION = 5
_LOOK_S = 60.0


async def run(
    job: Job, wiring: Wiring, stop: asyncio.Event, address: "asyncio.Future[str] | None" = None
) -> None:
    """Serves until `stop`; `address`, when given, gets the bound one. Raises SettingsError for
    settings that cannot work.
    """
    spec = job.spec
    preparation, layout, trained = (
        Preparation(spec),
        layout_of(spec),
        TrainedLog(wiring.output / "trained.jsonl"),
    )
    metrics = Metrics(PREPROCESSOR, job.name)
    with closing(EventLog(wiring.output / "events.jsonl")) as events:
        async with (
            serve_metrics(wiring.metrics_listen, metrics.exposition),
            open_tracer(job, PREPROCESSOR, wiring.name) as tracer,
            connect(
                wiring.nats_url,
                job.name,
                spec.stream,
                name=wiring.name,
                namespace=job.metadata.namespace,
                login=Login.of(wiring),
            ) as stream,
            open_reference(spec, wiring) as reference,
        ):
            live = await open_ledger(spec, stream, trained, events, metrics)
            live.tracer = tracer
            closed = ClosedTime(live, metrics.counter("admission_closed_seconds_total"))
            depths = Depths(live, metrics)
            services = [
                RpcService(
                    add_AdmissionServicer_to_server,
                    Admission(live, spec.task.group_size, closed),
                    "pipelinerl.v1.Admission",
                ),
                RpcService(
                    add_BatchesServicer_to_server,
                    Batches(live, layout, trained),
                    "pipelinerl.v1.Batches",
                ),
            ]
            async with serve(wiring.listen, services, token=wiring.token) as server:
                log.info("serving address=%s restored=%s", server.address, live.ledger.restored)
                if address is not None:
                    address.set_result(server.address)
                await run_until_first(
                    stop.wait(),
                    live.journal.run(),
                    receive(live, Intake(live, preparation, reference), stream),
                    expire_leases(live),
                    observe_load(live),
                    report(live, stream, metrics, depths, closed, wiring.name),
                )


async def receive(live: LiveLedger, intake: Intake, stream: Stream) -> None:
    """Consumes the sample stream, from the trainer's first Restore on: before, no group can be told
    from a void one.
    """
    while not live.ledger.restored:
        await live.batch_bell.wait(_LOOK_S)
    max_pending = 2 * live.waiting.max_groups + live.ledger.policy.max_outstanding()
    async with stream.samples(max_pending) as groups:
        await intake.run(groups)


async def expire_leases(live: LiveLedger) -> None:
    """Takes back the leases of actors that fell silent; looks a few times per lease."""
    while True:
        await asyncio.sleep(min(live.ledger.leases.lease_s / 8, 1.0))
        await live.given_up(live.ledger.expire(live.now()), DropReason.EXPIRED)
        live.changed()


async def observe_load(live: LiveLedger) -> None:
    """Notes every second how the engines do, and tells the policy every few: policies are tuned to
    that.
    """
    while True:
        for _ in range(NOTES_PER_OBSERVATION):
            await asyncio.sleep(NOTE_EVERY_S)
            if values := live.loads.values(live.now()):
                live.note("load", values)
        await live.observe(live.loads.observation(live.now(), NOTE_EVERY_S * NOTES_PER_OBSERVATION))


async def report(
    live: LiveLedger,
    stream: Stream,
    metrics: Metrics,
    depths: Depths,
    closed: ClosedTime,
    instance: str,
) -> None:
    """Produces a metrics record about every second."""
    while True:
        closed.count()
        try:
            await depths.look_at(stream, REPORT_EVERY_S)
        except TemporaryError as error:
            log.debug("stream depth unknown: %s", error)
        await stream.publish_metrics(record_of(metrics, instance, live.ledger.state.num_committed))
        await asyncio.sleep(REPORT_EVERY_S)
