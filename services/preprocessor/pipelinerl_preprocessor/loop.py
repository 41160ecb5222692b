"""The preprocessor's process: its loops, and how they are made from the job's settings.

    sample stream --> Intake --> LiveLedger (groups that wait) --> Batches --> trainer ranks
                                     |        ^                       |
                  actors <-- Admission        +---- commit, publish --+
                                     |
                                JournalWriter --> key-value bucket

The clock is the caller's `stop`; all loops run until then, and the services answer calls meanwhile.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace

from pipelinerl.v1.admission_pb2_grpc import add_AdmissionServicer_to_server
from pipelinerl.v1.batches_pb2_grpc import add_BatchesServicer_to_server
from pipelinerl_common.errors import SettingsError, TemporaryError
from pipelinerl_common.metrics import PREPROCESSOR, Metrics, record_of, serve_metrics
from pipelinerl_common.rpc import RpcService, serve
from pipelinerl_common.service import Wiring, run_until_first
from pipelinerl_common.settings import Job, JobSpec
from pipelinerl_common.stream import Login, Stream, connect
from pipelinerl_common.tracing import open_tracer
from pipelinerl_preprocessor.admission_service import Admission, ClosedTime
from pipelinerl_preprocessor.batch import RowLayout
from pipelinerl_preprocessor.batch_service import Batches
from pipelinerl_preprocessor.groups import DropReason
from pipelinerl_preprocessor.intake import Intake
from pipelinerl_preprocessor.journal import JournalWriter
from pipelinerl_preprocessor.ledger import Ledger
from pipelinerl_preprocessor.live import LiveLedger, PublishGate, RingBuffer
from pipelinerl_preprocessor.metrics import Depths, PreprocessorCounters
from pipelinerl_preprocessor.preparation import Preparation
from pipelinerl_preprocessor.reference import Reference
from pipelinerl_preprocessor.run_log import EventLog, TrainedLog
from pipelinerl_staleness.policy import Policy
from pipelinerl_staleness.recording import recorded
from pipelinerl_staleness.registry import make_policy

log = logging.getLogger(__name__)

REPORT_EVERY_S = 1.0
NOTE_EVERY_S = 1.0
NOTES_PER_OBSERVATION = 5
_LOOK_S = 60.0


async def run(job: Job, wiring: Wiring, stop: asyncio.Event) -> None:
    """Serves until `stop`. Raises SettingsError for settings that cannot work."""
    spec = job.spec
    preparation = Preparation(spec)
    trained = TrainedLog(wiring.output / "trained.jsonl")
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
            depths = Depths(live.ledger, live.loads, metrics, live.now)
            admission = Admission(live, spec.task.group_size, closed)
            batches = Batches(live, layout_of(spec), trained)
            services = [
                RpcService(add_AdmissionServicer_to_server, admission, "pipelinerl.v1.Admission"),
                RpcService(add_BatchesServicer_to_server, batches, "pipelinerl.v1.Batches"),
            ]
            async with serve(wiring.listen, services, token=wiring.token) as server:
                log.info("serving address=%s restored=%s", server.address, live.ledger.restored)
                await run_until_first(
                    stop.wait(),
                    live.journal.run(),
                    receive(live, Intake(live, preparation, reference), stream),
                    expire_leases(live),
                    observe_load(live),
                    report(live, stream, metrics, depths, closed, wiring.name),
                )


async def receive(live: LiveLedger, intake: Intake, stream: Stream) -> None:
    """Consumes the sample stream and produces ready groups until cancelled; waits for the trainer's
    first Restore, then for messages.
    """
    # Before a Restore the ledger cannot distinguish a group from one of a timeline that was left.
    while not live.ledger.restored:
        await live.batch_changed.wait(_LOOK_S)
    max_pending = 2 * live.waiting.max_groups + live.ledger.policy.max_outstanding()
    async with stream.samples(max_pending) as groups:
        await intake.run(groups)


async def expire_leases(live: LiveLedger) -> None:
    """Takes back leases that were not renewed, several times per lease, until cancelled."""
    while True:
        await asyncio.sleep(min(live.ledger.leases.lease_s / 8, 1.0))
        await live.given_up(live.ledger.expire(live.now()), DropReason.EXPIRED)
        live.changed()


async def observe_load(live: LiveLedger) -> None:
    """Logs the load of the engines every second and reports it to the policy every five, the
    interval to which policies are tuned, until cancelled.
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
    """Produces a metrics record about every second until cancelled."""
    while True:
        closed.count()
        try:
            await depths.update(
                stream,
                REPORT_EVERY_S,
                num_fetched=sum(received.num_messages for received in live.received.values()),
                num_forced=live.gate.num_forced,
            )
        except TemporaryError as error:
            log.debug("stream depth unknown: %s", error)
        await stream.publish_metrics(record_of(metrics, instance, live.ledger.state.num_committed))
        await asyncio.sleep(REPORT_EVERY_S)


def policy_of(spec: JobSpec) -> Policy:
    """The job's policy; one that counts trajectories gets the job's group size. Raises
    SettingsError when the policy's parameters name another one.
    """
    settings, group_size = spec.staleness.parse(), spec.task.group_size
    if "group_size" in settings.parameter_names():
        given = spec.staleness.parameters.get("group_size", group_size)
        if given != group_size:
            raise SettingsError(
                f"staleness.groupSize={given} differs from task.groupSize={group_size}: leave "
                "staleness.groupSize out"
            )
        settings = replace(settings, **{"group_size": group_size})
    return make_policy(settings, spec.algorithm.groups_per_step)


def ring_buffer_groups(spec: JobSpec, policy: Policy) -> int:
    """The room of the ring buffer, which is for all outstanding groups unless the job limits it."""
    return spec.preprocessor.ring_buffer_groups or policy.max_outstanding()


def layout_of(spec: JobSpec) -> RowLayout:
    """The layout of rows for a single rank."""
    return RowLayout(
        num_ranks=1,
        row_tokens=spec.trainers.micro_batch_tokens,
        temperature=spec.task.sampling.temperature,
        reference=spec.reference is not None,
        returns=spec.algorithm.baseline == "value",
    )


async def open_ledger(
    spec: JobSpec, stream: Stream, trained: TrainedLog, events: EventLog, metrics: Metrics
) -> LiveLedger:
    """The ledger that the journal holds, or one that waits for the trainer's Restore."""
    policy = recorded(policy_of(spec), events.write)
    settings = spec.preprocessor
    ledger = Ledger(
        policy,
        lease_s=settings.lease_seconds,
        max_attempts=settings.max_group_attempts,
        now=time.monotonic,
    )
    journal = JournalWriter(await stream.journal(), ledger)
    room = RingBuffer(ring_buffer_groups(spec, policy))
    # Within a trajectory's timeout and a lease every running group ends, or its lease does, so a
    # policy that waits for running groups holds no publish back longer.
    gate = PublishGate(ledger, spec.task.timeout_seconds + settings.lease_seconds, time.monotonic)
    live = LiveLedger(ledger, journal, room, gate, PreprocessorCounters(metrics), events.note)
    await journal.recover(live.now())
    if ledger.restored:
        trained.rewind(ledger.state.num_committed)
    return live


@asynccontextmanager
async def open_reference(spec: JobSpec, wiring: Wiring) -> AsyncIterator[Reference | None]:
    """The client of the reference model, None when the job has no reference model."""
    if spec.reference is None:
        yield None
        return
    temperature = spec.task.sampling.temperature
    async with Reference.open(
        wiring.references, temperature=temperature, token=wiring.token
    ) as reference:
        yield reference
