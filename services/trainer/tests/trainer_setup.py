"""A rank with an engine, put together as the run does it, on a tiny model, and its checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trainer_toys as toys
from torch import Tensor

from pipelinerl.v1 import batches_pb2
from pipelinerl_common.settings import JobSpec
from pipelinerl_trainer.checkpoint import Checkpoint, Checkpointer, CheckpointStore
from pipelinerl_trainer.engine import DeepSpeedEngine
from pipelinerl_trainer.learner import Learner
from pipelinerl_trainer.ranks import RankPlacement, Ranks, join_ranks
from pipelinerl_trainer.start import make_engine


@dataclass(frozen=True)
class Setup:
    """One rank's engine on the model in `prepared`, with checkpoints below `folder`."""

    folder: Path
    prepared: Path
    ranks: Ranks
    engine: DeepSpeedEngine
    learner: Learner

    @classmethod
    def of(
        cls,
        spec: JobSpec,
        folder: Path,
        ranks: Ranks,
        checkpoint: Checkpoint | None = None,
        *,
        prepared: Path | None = None,
    ) -> "Setup":
        """`prepared` is `folder`/model unless it is given."""
        prepared = prepared or folder / "model"
        engine = make_engine(spec, prepared, ranks, checkpoint)
        return cls(folder, prepared, ranks, engine, toys.learner(engine, ranks, spec.algorithm))

    @property
    def store(self) -> CheckpointStore:
        return store(self.folder)

    @property
    def checkpointer(self) -> Checkpointer:
        return Checkpointer(self.store, self.engine, self.ranks, self.prepared)

    def train(self, steps: range) -> list[float]:
        """On one rank. The losses."""
        batches = [toys.trajectories(4, seed=50 + step) for step in steps]
        return [
            self.learner.train_step(toys.batch_of([members[:3], members[3:]], members, step))[
                "loss"
            ]
            for step, members in zip(steps, batches, strict=True)
        ]

    def save(self, step: int) -> bool:
        return self.checkpointer.save(step, ledger(step) if self.ranks.is_leader else None)

    def served(self) -> dict[str, Tensor]:
        """Copies of what generators are sent."""
        return {name: weight.clone() for name, weight in self.engine.served_weights()}


@contextmanager
def setup(
    folder: Path, stage: int = 1, checkpoint: Checkpoint | None = None, **spec: Any
) -> Iterator[Setup]:
    """The only rank. The model is made if it is not there; `spec` is laid over a minimal job."""
    if not (folder / "model").exists():
        toys.save_tiny_model(folder / "model")
    trainers = {"zeroStage": stage, **spec.pop("trainers", {})}
    with join_ranks(RankPlacement()) as ranks:
        yield Setup.of(toys.job(**spec, trainers=trainers).spec, folder, ranks, checkpoint)


def store(folder: Path) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints", keep=2)


def newest(folder: Path) -> Checkpoint:
    found = store(folder).newest()
    assert found is not None
    return found


def ledger(step: int) -> batches_pb2.LedgerSnapshot:
    return batches_pb2.LedgerSnapshot(
        schema_version=1,
        num_committed_steps=step,
        next_prompt_index=2**40 + step,
        open_prompt_indices=[3, 5],
        incarnation=2,
    )
