"""What is trained on one rank, on two that share every row and on two that have rows of their own,
all to the same result.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import trainer_fakes as fakes

from pipelinerl_common.settings import JobSpec
from pipelinerl_trainer.engine import DeepSpeedEngine
from pipelinerl_trainer.learner import Learner, RankBatch
from pipelinerl_trainer.model import load_policy
from pipelinerl_trainer.ranks import Ranks

NUM_STEPS = 3
EVERYTHING = fakes.trajectories(7)
PACKINGS: Mapping[str, list[list[fakes.Trajectory]]] = {
    "one row": [EVERYTHING],
    "rows": [EVERYTHING[3:], [], EVERYTHING[:1], EVERYTHING[1:3]],
}
"""Rows of both ranks. With two ranks every slice border falls inside a sequence or right before
one; one row is a filler.
"""


@dataclass(frozen=True)
class Case:
    """One way to train. `model` is the folder of its tiny model."""

    options: dict[str, Any] = field(default_factory=dict)
    trainers: dict[str, Any] = field(default_factory=dict)
    model_options: dict[str, Any] = field(default_factory=dict)
    chunk_tokens: int | None = None
    """So many tokens are scored at a time."""
    tolerance: float = 1e-5
    model: str = "model"

    @cached_property
    def spec(self) -> JobSpec:
        return fakes.full_spec(
            self.options, trainers={"zeroStage": 1, **self.trainers}, model=self.model_options
        )

    def engine(self, folder: Path, ranks: Ranks) -> DeepSpeedEngine:
        policy = load_policy(folder / self.model, self.spec, ranks.device, ranks.sequence)
        fakes.spread_value_head(policy)
        if self.chunk_tokens is not None:
            policy.token_head._chunk_bytes = 4 * fakes.VOCABULARY * self.chunk_tokens
        return DeepSpeedEngine(policy, ranks, self.spec.zero_stage, self.spec.algorithm.optimizer)

    def batch(self, step: int, ranks: Ranks) -> RankBatch:
        """Rows of different lengths; with rows of their own, two ranks get one each."""
        members = fakes.trajectories(6, seed=10 + step)
        rows = [members[: 3 + step % 2], members[3 + step % 2 :]]
        num_data_ranks, data_rank = (
            ranks.num_ranks // ranks.sequence.size,
            ranks.rank // ranks.sequence.size,
        )
        return fakes.batch_of(rows[data_rank::num_data_ranks], members, step)

    def train(self, folder: Path, ranks: Ranks) -> dict[str, Any]:
        engine = self.engine(folder, ranks)
        return self.go_on(
            engine, fakes.learner(engine, ranks, self.spec.algorithm), ranks, range(NUM_STEPS)
        )

    def go_on(
        self, engine: DeepSpeedEngine, learner: Learner, ranks: Ranks, steps: range
    ) -> dict[str, Any]:
        return trained(
            engine, [fakes.train_step(learner, self.batch(step, ranks)) for step in steps]
        )


def trained(engine: DeepSpeedEngine, values: list[dict[str, float]]) -> dict[str, Any]:
    """What must come out the same: metrics of every step, and the weights."""
    weights = [
        (name, weight.float().flatten().tolist()) for name, weight in engine.served_weights()
    ]
    weights += [
        (name, weight.float().flatten().tolist()) for name, weight in engine.value_head_weights()
    ]
    return {"metrics": values, "weights": dict(weights)}


CASES: Mapping[str, Case] = {
    "plain": Case(),
    "value head": Case({"loss": "ppo", "gaeLambda": 0.9, "discount": 0.95}, {"zeroStage": 2}),
    "whole sequences": Case({"loss": "gspo"}, {"zeroStage": 3}),
    "one key-value head": Case(model="one-key-value-head"),
    "sliding windows": Case(model="sliding-windows"),
    "adapters": Case({"loss": "gspo"}, {"zeroStage": 2}, {"adapter": fakes.ADAPTER}),
    "adapters and a value head": Case(
        {"baseline": "value"}, {"zeroStage": 3}, {"adapter": fakes.ADAPTER}
    ),
    "mixture of experts": Case(
        {"loss": "gspo"}, {"activationCheckpointing": True}, model="mixture"
    ),
    "activation checkpointing": Case(
        {"baseline": "value"}, {"zeroStage": 3, "activationCheckpointing": True}
    ),
    "chunks": Case(chunk_tokens=3, trainers={"activationCheckpointing": True}),
    "bfloat16, head in float32": Case(
        model_options={"dtype": "bfloat16", "headDtype": "float32"}, tolerance=2e-2
    ),
}


def save_models(folder: Path) -> None:
    fakes.save_tiny_model(folder / "model")
    fakes.save_tiny_model(folder / "one-key-value-head", num_key_value_heads=1)
    fakes.save_tiny_model(folder / "sliding-windows", **fakes.SLIDING_WINDOWS)
    fakes.tiny_mixture("qwen3_moe").save_pretrained(folder / "mixture")
