"""Real ranks for tests: this process as one, with an engine on a tiny model and its checkpoints,
and programs that run as two ranks.
"""

import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trainer_fakes as fakes
from torch import Tensor

from pipelinerl.v1 import batches_pb2
from pipelinerl_common.settings import JobSpec
from pipelinerl_trainer.checkpoint import Checkpoint, Checkpointer, CheckpointStore
from pipelinerl_trainer.engine import DeepSpeedEngine
from pipelinerl_trainer.learner import Learner
from pipelinerl_trainer.ranks import RankPlacement, Ranks, join_ranks
from pipelinerl_trainer.start import make_engine


@dataclass(frozen=True)
class RankHarness:
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
    ) -> "RankHarness":
        """`prepared` is `folder`/model unless it is given."""
        prepared = prepared or folder / "model"
        engine = make_engine(spec, prepared, ranks, checkpoint)
        return cls(folder, prepared, ranks, engine, fakes.learner(engine, ranks, spec.algorithm))

    @property
    def store(self) -> CheckpointStore:
        return store(self.folder)

    @property
    def checkpointer(self) -> Checkpointer:
        return Checkpointer(self.store, self.engine, self.ranks, self.prepared)

    def train(self, steps: range) -> list[float]:
        """Trains steps on one rank and returns their losses."""
        batches = [fakes.trajectories(4, seed=50 + step) for step in steps]
        return [
            fakes.train_step(
                self.learner, fakes.batch_of([members[:3], members[3:]], members, step)
            )["loss"]
            for step, members in zip(steps, batches, strict=True)
        ]

    def save(self, step: int) -> bool:
        return self.checkpointer.save(step, ledger(step) if self.ranks.is_leader else None)

    def served(self) -> dict[str, Tensor]:
        """Returns copies of what generators receive."""
        return {name: weight.clone() for name, weight in self.engine.served_weights()}


@contextmanager
def setup(
    folder: Path, stage: int = 1, checkpoint: Checkpoint | None = None, **spec: Any
) -> Iterator[RankHarness]:
    """The only rank. The model is made if it is not there; `spec` is laid over a minimal job."""
    if not (folder / "model").exists():
        fakes.save_tiny_model(folder / "model")
    trainers = {"zeroStage": stage, **spec.pop("trainers", {})}
    with join_ranks(RankPlacement()) as ranks:
        yield RankHarness.of(fakes.job(**spec, trainers=trainers).spec, folder, ranks, checkpoint)


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


FIRST, LAST = 20_000, 32_000
"""Below the range that Linux gives away by itself: a group's own connections would take ports that
a later group needs.
"""


def free_ports(count: int) -> list[str]:
    """Returns `count` different free ports of this machine."""
    found: list[str] = []
    for port in random.sample(range(FIRST, LAST), LAST - FIRST):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(str(port))
        if len(found) == count:
            return found
    raise AssertionError(f"fewer than {count} ports from {FIRST} to {LAST} are free")


def run_two_ranks(folder: Path, program: str, arguments: list[str], timeout_s: float) -> None:
    """`program RANK arguments...` of this folder, twice. Raises AssertionError with the log of the
    one that failed.
    """
    path = str(Path(__file__).with_name(program))
    logs = [folder / f"rank-{rank}.log" for rank in (0, 1)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("wb") as output:
            command = [sys.executable, path, str(rank), *arguments]
            processes.append(subprocess.Popen(command, stdout=output, stderr=output))
    deadline = time.monotonic() + timeout_s
    try:
        while (
            None in (statuses := [process.poll() for process in processes])
            and time.monotonic() < deadline
        ):
            if any(statuses):
                break  # the other one would wait for it
            with suppress(subprocess.TimeoutExpired):
                processes[statuses.index(None)].wait(0.2)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for status, log in zip(statuses, logs, strict=True):
        assert not status, log.read_text(errors="replace")[-3000:]
    assert None not in statuses, (
        f"not done after {timeout_s:g} s:\n" + logs[0].read_text(errors="replace")[-3000:]
    )
