"""Starts one rank: the event loop with its servers and clients, and the training thread beside it.

event loop   run_rank -> _run_leader: Policy service, publisher, reporter, sinks   (rank 0)
thread       train: join the ranks, load the model, TrainingLoop.run            (every rank)
"""

import asyncio
import logging
from contextlib import aclosing
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
from pipelinerl_trainer.follower import ShareSender
from pipelinerl_trainer.learner import Learner
from pipelinerl_trainer.loop import LeaderServices, TrainingLoop
from pipelinerl_trainer.membership import FULL_NAME, Membership, PolicyServicer
from pipelinerl_trainer.model import load_policy
from pipelinerl_trainer.parity import ParityCheck, vocabulary_of
from pipelinerl_trainer.publisher import Publisher
from pipelinerl_trainer.ranks import RankPlacement, Ranks, join_ranks, rank_device
from pipelinerl_trainer.report import Reporter
from pipelinerl_trainer.served_share import ServedShare
from pipelinerl_trainer.source import BatchSource
from pipelinerl_weights.manifest import Manifest, TensorSpec
from pipelinerl_weights.nccl import require_cuda

log = logging.getLogger(__name__)

ANY_HOST = ("0.0.0.0", "[::]", "::", "")
TRANSFER_END_S, METRICS_END_S = 20.0, 5.0
"""Time at the end of a run for a transfer that is under way, and for the last metrics."""


@dataclass(frozen=True, slots=True)
class TrainerArgs:
    """The job, the wiring and the flags that a rank is started with."""

    job: Job
    wiring: Wiring
    placement: RankPlacement
    resume: bool
    """Whether to resume from the newest checkpoint; without one the run starts over."""
    last_metrics: Path | None = None
    """File that gets the newest step's numbers when training is finished."""

    @property
    def model_folder(self) -> Path:
        """The prepared model."""
        return self.wiring.output / MODEL

    @property
    def store(self) -> CheckpointStore:
        """The checkpoints of this run."""
        keep = self.job.spec.trainers.checkpoint.keep
        return CheckpointStore(self.wiring.output / "checkpoints", keep)

    @property
    def advertised_address(self) -> str:
        """Where generators reach this host: the host that is listened on, or rank 0's own when that
        is every one.
        """
        host = self.wiring.listen.rpartition(":")[0]
        return self.placement.master_address if host in ANY_HOST else host


async def run_rank(args: TrainerArgs, stop: asyncio.Event) -> None:
    """Runs one rank from start to end. Raises SettingsError, or another error when the rank must be
    restarted.
    """
    events = EventLoopProxy()
    forwarding = asyncio.create_task(_forward(stop, events), name="stop")
    try:
        async with rpc.connect(args.wiring.preprocessor, token=args.wiring.token) as channel:
            client = BatchClient(channel, args.placement.data_rank, args.placement.num_data_ranks)
            run = _run_leader if args.placement.rank == 0 else _run_follower
            await run(args, events, client)
    finally:
        forwarding.cancel()


async def _forward(stop: asyncio.Event, events: EventLoopProxy) -> None:
    await stop.wait()
    events.stop()


async def _run_follower(args: TrainerArgs, events: EventLoopProxy, client: BatchClient) -> None:
    """Runs any other rank. Rank 0 has the metrics of all ranks, so the first rank of another node
    serves nothing but its own memory.
    """
    metrics = Metrics(TRAINER, args.job.name)
    metrics.gauge("memory_bytes").read(memory_bytes)
    listen = args.wiring.metrics_listen if args.placement.local_rank == 0 else ""
    async with serve_metrics(listen, metrics.exposition):
        timeout_s = args.job.spec.weight_transfer.sync_timeout_seconds
        device = rank_device(args.placement)
        sender = ShareSender(args.placement, device, args.wiring.token, timeout_s)
        training = partial(train, args, events, client, sender, None)
        await run_until_first(in_thread(training, "training"), sender.run())


async def _run_leader(args: TrainerArgs, events: EventLoopProxy, client: BatchClient) -> None:
    """Runs rank 0: training in its thread, and the services that speak for all ranks beside it."""
    wiring, spec = args.wiring, args.job.spec
    metrics = Metrics(TRAINER, args.job.name)
    reporter = Reporter(metrics, wiring.name, args.job.metadata.namespace)
    sinks = SinkProcess(spec.telemetry.sinks, wiring, metrics)
    num_ranks = args.placement.num_ranks
    async with (
        aclosing(
            Membership(args.advertised_address, rank_device(args.placement), num_ranks)
        ) as membership,
        rpc.connect(wiring.coordinator, token=wiring.token) as coordinator,
        serve_metrics(wiring.metrics_listen, metrics.exposition),
        open_tracer(args.job, TRAINER, wiring.name) as tracer,
    ):
        publisher = Publisher(
            coordinator,
            client.mark_published,
            client.may_publish,
            timeout_s=spec.weight_transfer.sync_timeout_seconds,
            may_roll_back=args.resume,
        )
        publisher.tracer, publisher.on_status = tracer, reporter.published
        membership.on_change = publisher.wake
        servicer = PolicyServicer(membership, num_ranks)

        async def train_and_flush() -> None:
            training = partial(train, args, events, client, publisher, leader)
            await in_thread(training, "training")
            await publisher.finish(TRANSFER_END_S)
            await reporter.finish(METRICS_END_S)
            if args.last_metrics is not None:
                reporter.write_last(args.last_metrics)
            await sinks.finish()

        service = rpc.RpcService(policy_pb2_grpc.add_PolicyServicer_to_server, servicer, FULL_NAME)
        async with rpc.serve(wiring.listen, [service], token=wiring.token) as server:
            log.info("serving=%s", server.address)
            port = server.address.rpartition(":")[2]
            policy_address = f"{args.advertised_address}:{port}"
            leader = LeaderServices(publisher, reporter, servicer, tracer, policy_address)
            await run_until_first(
                train_and_flush(),
                publisher.run(membership),
                sinks.run(),
                reporter.run(wiring.nats_url, spec.stream, Login.of(wiring)),
            )


def train(
    args: TrainerArgs,
    events: EventLoopProxy,
    client: BatchClient,
    sender: Publisher | ShareSender,
    leader: LeaderServices | None,
) -> None:
    """Does everything from joining the other ranks to the exported model, in the training thread.
    `sender` takes shares of new versions in the event loop; `leader` is given on rank 0.
    """
    spec = args.job.spec
    if spec.actors.gpus_per_replica:
        require_cuda("actors.gpusPerReplica")
    with join_ranks(args.placement, spec.trainers) as ranks:
        address = ranks.from_leader(leader.policy_address.encode() if leader else b"").decode()
        if isinstance(sender, ShareSender):
            events.call(sender.follow, address)
        seed_everything(spec.seed)
        checkpoint = choose_checkpoint(args, ranks)
        engine = make_engine(spec, args.model_folder, ranks, checkpoint)
        vocabulary = vocabulary_of(engine.policy.language_model)
        loop = TrainingLoop(
            spec=spec,
            ranks=ranks,
            engine=engine,
            learner=Learner(engine, ranks, spec.algorithm, spec.task.sampling.max_tokens),
            source=BatchSource(client, events, ranks),
            checkpointer=Checkpointer(args.store, engine, ranks, args.model_folder),
            parity=ParityCheck(spec, args.wiring.generators, args.wiring.token, vocabulary),
            share=ServedShare(engine, manifest_of(engine, spec), ranks),
            offer=sender.offer,
            export=partial(
                export_final, engine, ranks, args.model_folder, args.wiring.output / "final"
            ),
            events=events,
            leader=leader,
            step=0 if checkpoint is None else checkpoint.step,
            ledger=None if checkpoint is None else ledger_of(checkpoint),
        )
        if leader is not None:
            events.call(leader.servicer.open, lambda: loop.step)
        loop.run()


def choose_checkpoint(args: TrainerArgs, ranks: Ranks) -> Checkpoint | None:
    """Returns the checkpoint to resume from, which rank 0 chooses. Raises SettingsError when a run
    without --resume would mix with an older one.
    """
    newest = args.store.newest() if ranks.is_leader else None
    step = int(ranks.gather([-1 if newest is None else newest.step])[0].item())
    if step < 0:
        return None
    if not args.resume:
        raise SettingsError(
            f"{args.store.folder} already holds a checkpoint of step {step}: pass --resume to "
            "resume from it, or choose another --output for a new run"
        )
    chosen = args.store.newest()
    if chosen is None or chosen.step != step:
        raise SettingsError(
            f"{args.store.folder}: rank 0 sees a checkpoint of step {step} and rank {ranks.rank} "
            "does not; share it"
        )
    log.info("resuming from %s", chosen.folder)
    return chosen


def make_engine(
    spec: JobSpec, prepared: Path, ranks: Ranks, checkpoint: Checkpoint | None
) -> DeepSpeedEngine:
    """Returns the model and its optimizer as they were at the checkpoint, or without one as the
    model folder `prepared` has them.
    """
    folder = prepared
    # An adapter's checkpoint holds merged weights; training resumes on the frozen ones below it.
    if checkpoint is not None and spec.model.adapter is None:
        folder = checkpoint.folder / MODEL
    policy = load_policy(folder, spec, ranks.device, ranks.sequence)
    if checkpoint is not None:
        load_value_head(policy, checkpoint)
        load_adapter(policy, checkpoint)
    algorithm = spec.algorithm
    # Disks differ, and the first collective of training has no time for that.
    ranks.gather([0.0])
    engine = DeepSpeedEngine(
        policy,
        ranks,
        spec.zero_stage,
        algorithm.optimizer,
        algorithm.experimental.delay_compensation,
    )
    ranks.limit_collectives()
    if checkpoint is not None:
        load_optimizer(engine, ranks, checkpoint)
    return engine


def manifest_of(engine: DeepSpeedEngine, spec: JobSpec) -> Manifest:
    """Returns what is sent: every weight, or the adapter's, in the job's element type and the
    engine's order.
    """
    tensors = tuple(
        TensorSpec(name, spec.model.dtype, shape) for name, shape in engine.served_shapes.items()
    )
    return Manifest(tensors, spec.weight_transfer.bucket_bytes)
