"""What runs in the training thread of one rank: join the others, load, put the loop together, run
it.

Puts one rank together: the event loop with its servers and clients, and the training thread
beside it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pipelinerl.v1 import policy_pb2_grpc
from pipelinerl_common import rpc
from pipelinerl_common.checkpoints import MODEL
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.metrics import TRAINER, Metrics, serve_metrics
from pipelinerl_common.service import Wiring, run_until_first
from pipelinerl_common.settings import Job, JobSpec
from pipelinerl_common.sinks.process import SinkProcess
from pipelinerl_common.stream import Login
from pipelinerl_common.telemetry import memory_bytes
from pipelinerl_common.tracing import open_tracer
from pipelinerl_trainer.batch_client import BatchClient
from pipelinerl_trainer.checkpoint import (
    Checkpoint,
    Checkpointer,
    CheckpointStore,
    ledger_of,
    load_adapter,
    load_optimizer,
    load_value_head,
    seed_everything,
)
from pipelinerl_trainer.engine import DeepSpeedEngine
from pipelinerl_trainer.event_loop import EventLoopProxy, in_thread
from pipelinerl_trainer.export import export_final
from pipelinerl_trainer.learner import Learner
from pipelinerl_trainer.loop import LeaderServices, Parts, TrainingLoop
from pipelinerl_trainer.membership import FULL_NAME, Membership, PolicyServicer
from pipelinerl_trainer.model import load_policy
from pipelinerl_trainer.parity import ParityCheck, vocabulary_of
from pipelinerl_trainer.publisher import Publisher
from pipelinerl_trainer.ranks import RankPlacement, Ranks, join_ranks
from pipelinerl_trainer.report import Reporter
from pipelinerl_trainer.source import BatchSource
from pipelinerl_weights.manifest import Manifest, TensorSpec

log = logging.getLogger(__name__)

ANY_HOST = ("0.0.0.0", "[::]", "::", "")


@dataclass(frozen=True, slots=True)
class TrainerArgs:
    """What a rank is told at its start."""

    job: Job
    wiring: Wiring
    place: RankPlacement
    resume: bool
    """Go on from the newest checkpoint; without one, start over."""
    last_metrics: Path | None = None
    """File that gets the newest step's numbers when training is finished."""

    @property
    def model_folder(self) -> Path:
        """The prepared model."""
        return self.wiring.output / MODEL

    @property
    def final_folder(self) -> Path:
        return self.wiring.output / "final"

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore(
            self.wiring.output / "checkpoints", self.job.spec.trainers.checkpoint.keep
        )

    @property
    def advertised_address(self) -> str:
        """Where generators reach this host: the host that is listened on, or rank 0's own when that
        is every one.
        """
        host = self.wiring.listen.rpartition(":")[0]
        return self.place.master_address if host in ANY_HOST else host


def train(
    run: TrainerArgs, bridge: EventLoopProxy, client: BatchClient, desk: LeaderServices | None
) -> None:
    """Everything from joining the other ranks to the exported model. `desk` is rank 0's."""
    with join_ranks(run.place) as ranks:
        seed_everything(run.job.spec.seed)
        checkpoint = choose_checkpoint(run, ranks)
        engine = make_engine(run.job.spec, run.model_folder, ranks, checkpoint)
        loop = make_loop(run, ranks, engine, bridge, client, desk, checkpoint)
        if desk is not None:
            bridge.call(desk.servicer.open, lambda: loop.step)
        loop.run()


def choose_checkpoint(run: TrainerArgs, ranks: Ranks) -> Checkpoint | None:
    """The one to go on from: rank 0's choice. Raises SettingsError when a run without --resume
    would mix with an older one.
    """
    newest = run.store.newest() if ranks.is_leader else None
    step = int(ranks.gather([-1 if newest is None else newest.step])[0].item())
    if step < 0:
        return None
    if not run.resume:
        raise SettingsError(
            f"{run.store.folder} already holds a checkpoint of step {step}: pass --resume to go on "
            "from it, or choose another "
            "--output for a new run"
        )
    chosen = run.store.newest()
    if chosen is None or chosen.step != step:
        raise SettingsError(
            f"{run.store.folder}: rank 0 sees a checkpoint of step {step} and rank {ranks.rank} "
            "does not; share it"
        )
    log.info("resuming from %s", chosen.folder)
    return chosen


def make_engine(
    spec: JobSpec, prepared: Path, ranks: Ranks, checkpoint: Checkpoint | None
) -> DeepSpeedEngine:
    """The model and its optimizer, as they were at the checkpoint, or without one as the model
    folder `prepared` has them.
    """
    folder = prepared
    if (
        checkpoint is not None and spec.model.adapter is None
    ):  # an adapter goes on from what it was begun on
        folder = checkpoint.folder / MODEL
    policy = load_policy(folder, spec, ranks.device, ranks.sequence)
    if checkpoint is not None:
        load_value_head(policy, checkpoint)
        load_adapter(policy, checkpoint)
    engine = DeepSpeedEngine(policy, ranks, spec.trainers.zero_stage, spec.algorithm.optimizer)
    if checkpoint is not None:
        load_optimizer(engine, ranks, checkpoint)
    return engine


def manifest_of(engine: DeepSpeedEngine, run: TrainerArgs) -> Manifest:
    """What is broadcast: every weight, or the adapter's, in the job's element type and the engine's
    order.
    """
    spec = run.job.spec
    tensors = tuple(
        TensorSpec(name, spec.model.dtype, shape) for name, shape in engine.served_shapes.items()
    )
    return Manifest(tensors, spec.weight_transfer.bucket_bytes)


def make_loop(
    run: TrainerArgs,
    ranks: Ranks,
    engine: DeepSpeedEngine,
    bridge: EventLoopProxy,
    client: BatchClient,
    desk: LeaderServices | None,
    checkpoint: Checkpoint | None,
) -> TrainingLoop:
    spec = run.job.spec
    vocabulary = vocabulary_of(engine.policy.language_model)
    parts = Parts(
        spec=spec,
        ranks=ranks,
        engine=engine,
        learner=Learner(engine, ranks, spec.algorithm, spec.task.sampling.max_tokens),
        source=BatchSource(client, bridge, ranks),
        bridge=bridge,
        checkpointer=Checkpointer(run.store, engine, ranks, run.model_folder),
        parity=ParityCheck(spec, run.wiring.generators, run.wiring.token, vocabulary),
        manifest=manifest_of(engine, run),
        export=partial(export_final, engine, ranks, run.model_folder, run.final_folder),
        desk=desk,
    )
    if checkpoint is None:
        return TrainingLoop(parts, step=0, ledger=None)
    return TrainingLoop(parts, checkpoint.step, ledger_of(checkpoint))


TRANSFER_END_S, METRICS_END_S = 20.0, 5.0
"""Time at the end for a transfer that is under way, and for the last metrics."""


async def run_rank(run: TrainerArgs, stop: asyncio.Event) -> None:
    """One rank from start to end. Raises SettingsError, or another error when the rank must be
    restarted.
    """
    bridge = EventLoopProxy()
    forwarding = asyncio.create_task(_forward(stop, bridge), name="stop")
    try:
        async with rpc.connect(run.wiring.preprocessor, token=run.wiring.token) as channel:
            client = BatchClient(channel, run.place.data_rank, run.place.num_data_ranks)
            if run.place.rank == 0:
                await _run_leader(run, bridge, client)
            else:
                async with _serve_memory(run):
                    await in_thread(partial(train, run, bridge, client, None))
    finally:
        forwarding.cancel()


@asynccontextmanager
async def _serve_memory(run: TrainerArgs) -> AsyncIterator[None]:
    """Metrics are rank 0's, for all; the first rank of another node tells no more than its own
    memory.
    """
    metrics = Metrics(TRAINER, run.job.name)
    metrics.gauge("memory_bytes").read(memory_bytes)
    async with serve_metrics(
        run.wiring.metrics_listen if run.place.local_rank == 0 else "", metrics.exposition
    ):
        yield


async def _run_leader(run: TrainerArgs, bridge: EventLoopProxy, client: BatchClient) -> None:
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
            desk = LeaderServices(publisher, reporter, servicer, tracer)
            sinks = SinkProcess(run.job.spec.telemetry.sinks, run.wiring, metrics)
            await run_until_first(
                _train_as_leader(run, bridge, client, desk, sinks),
                publisher.run(membership),
                sinks.run(),
                reporter.run(run.wiring.nats_url, run.job.spec.stream, Login.of(run.wiring)),
            )


async def _train_as_leader(
    run: TrainerArgs,
    bridge: EventLoopProxy,
    client: BatchClient,
    desk: LeaderServices,
    sinks: SinkProcess,
) -> None:
    """The clock: training, then what is still on its way."""
    await in_thread(partial(train, run, bridge, client, desk))
    await desk.publisher.finish(TRANSFER_END_S)
    await desk.reporter.finish(METRICS_END_S)
    if run.last_metrics is not None:
        desk.reporter.write_last(run.last_metrics)
    await sinks.finish()


@asynccontextmanager
async def _membership(run: TrainerArgs) -> AsyncIterator[Membership]:
    membership = Membership(run.advertised_address)
    try:
        yield membership
    finally:
        await membership.close()


async def _forward(stop: asyncio.Event, bridge: EventLoopProxy) -> None:
    await stop.wait()
    bridge.stop()
