"""What each rank of the multi-rank tests runs; one launch covers every ZeRO stage, so that the
start is paid once.

    python trainer_rank_program.py RANK NUM_RANKS FOLDER PORT...

Ports: three per stage, two for the algorithms without and with a value head, four for adapters,
one for mixtures.
Rank 0 writes to FOLDER `gradient-<stage>-<packing>.safetensors`,
`gradient-algorithm-<name>.safetensors`, `adapter-<stage>.safetensors` and `results.json`.
"""

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pipelinerl_trainer.engine import DeepSpeedEngine, prepare_environment

RANK, NUM_RANKS, FOLDER = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
PORTS = [int(port) for port in sys.argv[4:]]
torch.set_num_threads(1)
prepare_environment(RANK, RANK, NUM_RANKS)

import trainer_fakes as fakes  # noqa: E402
from deepspeed.utils import safe_get_full_grad  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from trainer_harness import RankHarness, newest  # noqa: E402

from pipelinerl_trainer.batch_client import Pulled  # noqa: E402
from pipelinerl_trainer.learner import Learner, RankBatch  # noqa: E402
from pipelinerl_trainer.ranks import RankPlacement, Ranks, Vote, join_ranks  # noqa: E402
from pipelinerl_trainer.served_share import ServedShare  # noqa: E402
from pipelinerl_trainer.source import BatchSource  # noqa: E402
from pipelinerl_weights.manifest import Manifest, TensorSpec  # noqa: E402

EVERYTHING = fakes.trajectories(7)
# Rows by rank. The second packing gives rank 1 a filler row and other neighbours.
PACKINGS = {
    "even": [[EVERYTHING[:2], EVERYTHING[2:4]], [EVERYTHING[4:6], EVERYTHING[6:]]],
    "uneven": [[EVERYTHING[3:], EVERYTHING[:1], EVERYTHING[1:2]], [EVERYTHING[2:3], [], []]],
}


def place(port: int) -> RankPlacement:
    return RankPlacement(RANK, NUM_RANKS, RANK, "127.0.0.1", port)


def batch(step: int) -> RankBatch:
    everything = fakes.trajectories(6, seed=10 + step)
    rows = [[everything[:2], everything[2:4]], [everything[4:], []]]
    return fakes.batch_of(rows[RANK], everything, step)


def gradients(engine: DeepSpeedEngine, learner: Learner, stage: int) -> None:
    for name, rows in PACKINGS.items():
        learner.accumulate(fakes.batch_of(rows[RANK], EVERYTHING))
        save_gradient(engine, f"{stage}-{name}")


def algorithms(ranks: Ranks, *, with_value_head: bool) -> None:
    """The gradient of each algorithm; one engine serves all that have the same heads."""
    settings = {name: fakes.full_algorithm(**options) for name, options in fakes.ALGORITHMS.items()}
    chosen = {
        name: each
        for name, each in settings.items()
        if (each.baseline == "value") is with_value_head
    }
    first = next(iter(chosen.values()))
    engine = DeepSpeedEngine(fakes.tiny_policy(first), ranks, 2, first.optimizer)
    for name, each in chosen.items():
        fakes.learner(engine, ranks, each).accumulate(
            fakes.batch_of(PACKINGS["uneven"][RANK], EVERYTHING)
        )
        save_gradient(engine, f"algorithm-{name}")


def save_gradient(engine: DeepSpeedEngine, name: str) -> None:
    found = {
        key: safe_get_full_grad(parameter) for key, parameter in engine.policy.named_parameters()
    }
    engine.apply(learning_rate=0.0)
    if RANK == 0:
        save_file(
            {key: value.clone() for key, value in found.items()},
            FOLDER / f"gradient-{name}.safetensors",
        )


class Script:
    """A preprocessor's answers to one rank's pulls, and an event loop's place."""

    is_stopping = False

    def __init__(self, *answers: Pulled) -> None:
        self.answers = list(answers)
        self.asked: list[int] = []

    async def pull(self, step: int, batch_id: str = "", num_had: int = 0) -> Pulled:
        self.asked.append(num_had)
        return self.answers.pop(0)

    def wait(self, coroutine: Any, timeout_s: float) -> Any:
        return asyncio.run(coroutine)

    def pause(self, seconds: float) -> None: ...

    def source(self, ranks: Ranks) -> BatchSource:
        return BatchSource(self, self, ranks)  # type: ignore[arg-type]


def streamed(
    ranks: Ranks, engine: DeepSpeedEngine, learner: Learner, stage: int
) -> dict[str, bool]:
    """Rank 0 receives one row, then two; rank 1 two, then must wait, then one. Before that rank 1
    alone is notified that the batch was replaced.
    """
    parts = fakes.parts_of(PACKINGS["uneven"][RANK], EVERYTHING)
    first, second, third = parts
    other = Pulled(batch=RankBatch(replace(first.plan, batch_id="other"), first.micro_batches))
    before = weights(engine)
    script = Script(other) if RANK else Script(Pulled(batch=second))
    replaced = learner.train(first, script.source(ranks).parts(first)) is None
    unchanged = weights(engine) == before
    if RANK == 0:
        script = Script(
            Pulled(batch=RankBatch(third.plan, second.micro_batches + third.micro_batches))
        )
    else:
        script = Script(Pulled(wait_reason="not yet"), Pulled(batch=third))
        first = RankBatch(second.plan, first.micro_batches + second.micro_batches)
    learner.accumulate_parts(script.source(ranks).parts(first))
    assert script.asked == ([1] if RANK == 0 else [2, 2])
    save_gradient(engine, f"{stage}-streamed")
    return {"replaced": replaced, "unchanged": unchanged}


def pulled(ranks: Ranks) -> bool:
    """Rank 0 receives a growing batch, rank 1 the complete one: they pull again until they have the
    same.
    """
    parts = fakes.parts_of(PACKINGS["uneven"][RANK], EVERYTHING)
    whole = Pulled(batch=fakes.batch_of(PACKINGS["uneven"][RANK], EVERYTHING))
    script = Script(whole if RANK else Pulled(batch=parts[0]), whole)
    found = script.source(ranks).next_batch(0)
    assert found is not None
    return not (found.plan.provisional or script.answers)


def weights(engine: DeepSpeedEngine) -> list[float]:
    return [float(value) for _, weight in engine.served_weights() for value in weight.flatten()[:3]]


def poisoned(learner: Learner, engine: DeepSpeedEngine) -> dict[str, object]:
    """A number that is not one, on rank 1 only."""
    bad = batch(9)
    if RANK == 1:
        row = bad.micro_batches[0]
        row.advantages_L[row.loss_mask_L == 1] = float("nan")
    before = weights(engine)
    values = fakes.train_step(learner, bad)
    return {
        "unchanged": weights(engine) == before,
        "skipped": values["skipped_steps_total"],
        "has_norm": "grad_norm" in values,
    }


def setup(ranks: Ranks, stage: int, *, resumes: bool = False, **spec: Any) -> RankHarness:
    """With a folder for the checkpoints of each stage, with adapters and without."""
    folder = FOLDER / f"{'adapter' if spec else 'whole'}-{stage}"
    full = fakes.full_spec(trainers={"zeroStage": stage}, **spec)
    return RankHarness.of(
        full, folder, ranks, newest(folder) if resumes else None, prepared=FOLDER / "model"
    )


def train_and_save(ranks: Ranks, stage: int) -> dict[str, object]:
    made = setup(ranks, stage)
    learner, engine = made.learner, made.engine
    skipped = poisoned(learner, engine)
    first = [fakes.train_step(learner, batch(step)) for step in (0, 1)]
    saved = made.save(2)
    return {
        "skipped": skipped,
        "saved": saved,
        "first": first,
        "second": second_half(learner),
        "weights": weights(engine),
    }


def second_half(learner: Learner) -> list[dict[str, float]]:
    return [fakes.train_step(learner, batch(step)) for step in (2, 3)]


def resume(ranks: Ranks, stage: int) -> dict[str, object]:
    made = setup(ranks, stage, resumes=True)
    return {"second": second_half(made.learner), "weights": weights(made.engine)}


def adapters(ranks: Ranks, stage: int, *, resumes: bool = False) -> None:
    """Four steps of adapters with a checkpoint after two, or the last two of them from that."""
    made = setup(ranks, stage, resumes=resumes, model={"adapter": fakes.ADAPTER})
    if not resumes:
        for step in (0, 1):
            fakes.train_step(made.learner, batch(step))
        assert made.save(2)
    second_half(made.learner)
    found = shares(ranks, made.engine)
    assert found["is_same"]
    assert found["is_complete"]
    served = made.served()
    if RANK == 0:
        save_file(served, FOLDER / f"adapter-{'resumed-' * resumes}{stage}.safetensors")


def shares(ranks: Ranks, engine: DeepSpeedEngine) -> dict[str, object]:
    """Whether this rank's share has the bytes that are served, and the items of all shares."""
    specs = (TensorSpec(name, "float32", shape) for name, shape in engine.served_shapes.items())
    manifest = Manifest(tuple(specs), 1 << 20)
    snapshot = ServedShare(engine, manifest, ranks).snapshot()
    full = {name: weight.flatten().clone() for name, weight in engine.served_weights()}
    names = [spec.name for spec in manifest.tensors]
    is_same = all(
        torch.equal(snapshot.view(position), full[names[index]][begin:end])
        for position, (index, begin, end) in enumerate(snapshot.extents)
    )
    mine = torch.zeros(len(names), dtype=torch.float64)
    for index, begin, end in snapshot.extents:
        mine[index] += end - begin
    by_rank = ranks.gather([float(is_same), float(snapshot.num_bytes), *mine.tolist()])
    return {
        "is_same": bool(by_rank[:, 0].all()),
        "bytes": by_rank[:, 1].tolist(),
        "is_complete": by_rank[:, 2:].sum(0).tolist() == [len(full[name]) for name in names],
    }


def votes(ranks: Ranks) -> list[str]:
    """Agreement: same batch, different batches, one rank waits, one is asked to stop."""
    return [
        ranks.vote(Vote.READY, "batch").name,
        ranks.vote(Vote.READY, f"batch of {RANK}").name,
        ranks.vote(Vote.WAIT if RANK else Vote.READY).name,
        ranks.vote(Vote.STOP if RANK else Vote.DONE).name,
    ]


def main() -> None:
    results: dict[str, object] = {}
    for stage, ports in zip((1, 2, 3), (PORTS[:3], PORTS[3:6], PORTS[6:9]), strict=True):
        with join_ranks(place(ports[0])) as ranks:
            made = setup(ranks, stage)
            gradients(made.engine, made.learner, stage)
            results["replaced"] = streamed(ranks, made.engine, made.learner, stage)
            results[f"shares-{stage}"] = shares(ranks, made.engine)
            results["votes"] = votes(ranks)
            results["pulled"] = pulled(ranks)
        with join_ranks(place(ports[1])) as ranks:
            results[f"straight-{stage}"] = train_and_save(ranks, stage)
        with join_ranks(place(ports[2])) as ranks:
            results[f"resumed-{stage}"] = resume(ranks, stage)
    for with_value_head, port in ((False, PORTS[9]), (True, PORTS[10])):
        with join_ranks(place(port)) as ranks:
            algorithms(ranks, with_value_head=with_value_head)
    for stage, resumes, port in (
        (1, False, PORTS[11]),
        (2, False, PORTS[12]),
        (3, False, PORTS[13]),
        (3, True, PORTS[14]),
    ):
        with join_ranks(place(port)) as ranks:
            adapters(ranks, stage, resumes=resumes)
    with join_ranks(place(PORTS[15])) as ranks:
        for kind in ("qwen3_moe", "mixtral"):
            spec = fakes.full_spec(trainers={"zeroStage": 3})
            made = RankHarness.of(spec, FOLDER, ranks, prepared=FOLDER / kind)
            results[f"shares-{kind}"] = shares(ranks, made.engine)
    if RANK == 0:
        (FOLDER / "results.json").write_text(json.dumps(results), encoding="utf-8")


main()
