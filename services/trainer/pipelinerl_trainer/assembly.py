"""What runs in the training thread of one rank: join the others, load, put the loop together, run
it.
"""

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pipelinerl_common.checkpoints import MODEL
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.service import Wiring
from pipelinerl_common.settings import Job, JobSpec
from pipelinerl_trainer.batches import BatchesClient
from pipelinerl_trainer.bridge import Bridge
from pipelinerl_trainer.checkpoint import (
    Checkpointer,
    ledger_of,
    load_adapter,
    load_optimizer,
    load_value_head,
)
from pipelinerl_trainer.checkpoint_store import Checkpoint, CheckpointStore
from pipelinerl_trainer.engine import Engine
from pipelinerl_trainer.export import export_final
from pipelinerl_trainer.learner import Learner
from pipelinerl_trainer.loop import Desk, Parts, TrainingLoop
from pipelinerl_trainer.model import load_policy
from pipelinerl_trainer.parity import ParityCheck, vocabulary_of
from pipelinerl_trainer.randomness import seed_everything
from pipelinerl_trainer.ranks import Place, Ranks, join_ranks
from pipelinerl_trainer.source import BatchSource
from pipelinerl_weights.manifest import Manifest, TensorSpec

log = logging.getLogger(__name__)

ANY_HOST = ("0.0.0.0", "[::]", "::", "")


@dataclass(frozen=True, slots=True)
class Run:
    """What a rank is told at its start."""

    job: Job
    wiring: Wiring
    place: Place
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


def train(run: Run, bridge: Bridge, client: BatchesClient, desk: Desk | None) -> None:
    """Everything from joining the other ranks to the exported model. `desk` is rank 0's."""
    with join_ranks(run.place) as ranks:
        seed_everything(run.job.spec.seed)
        checkpoint = choose_checkpoint(run, ranks)
        engine = make_engine(run.job.spec, run.model_folder, ranks, checkpoint)
        loop = make_loop(run, ranks, engine, bridge, client, desk, checkpoint)
        if desk is not None:
            bridge.call(desk.servicer.open, manifest_of(engine, run), lambda: loop.step)
        loop.run()


def choose_checkpoint(run: Run, ranks: Ranks) -> Checkpoint | None:
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
) -> Engine:
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
    engine = Engine(policy, ranks, spec.trainers.zero_stage, spec.algorithm.optimizer)
    if checkpoint is not None:
        load_optimizer(engine, ranks, checkpoint)
    return engine


def manifest_of(engine: Engine, run: Run) -> Manifest:
    """What is broadcast: every weight, or the adapter's, in the job's element type and the engine's
    order.
    """
    spec = run.job.spec
    tensors = tuple(
        TensorSpec(name, spec.model.dtype, shape) for name, shape in engine.served_shapes.items()
    )
    return Manifest(tensors, spec.weight_transfer.bucket_bytes)


def make_loop(
    run: Run,
    ranks: Ranks,
    engine: Engine,
    bridge: Bridge,
    client: BatchesClient,
    desk: Desk | None,
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
