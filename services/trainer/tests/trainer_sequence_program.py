"""What each of two ranks runs that share every row; one launch covers all cases, so that the start
is paid once.

    python trainer_sequence_program.py RANK FOLDER PORT...

Rank 0 leaves in FOLDER `gradient-<stage>-<packing>.safetensors`,
`gradient-algorithm-<name>.safetensors` and `results.json`. Both ranks must come to the same
results: each writes its own `results-<rank>.json`.
"""

import json
import sys
from pathlib import Path

import torch

from pipelinerl_trainer.engine import DeepSpeedEngine, prepare_environment

RANK, FOLDER, PORTS = int(sys.argv[1]), Path(sys.argv[2]), [int(port) for port in sys.argv[3:]]
NUM_RANKS = 2
torch.set_num_threads(1)
prepare_environment(RANK, RANK, NUM_RANKS)

import trainer_fakes as fakes  # noqa: E402
import trainer_sequence_cases as cases  # noqa: E402
from deepspeed.utils import safe_get_full_grad  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from trainer_harness import RankHarness, newest  # noqa: E402

from pipelinerl_trainer.ranks import RankPlacement, Ranks, join_ranks  # noqa: E402


def place(port: int, *, shared: bool = True) -> RankPlacement:
    return RankPlacement(RANK, NUM_RANKS, RANK, "127.0.0.1", port, NUM_RANKS if shared else 1)


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


def gradients(ranks: Ranks, stage: int) -> None:
    settings = fakes.full_algorithm()
    engine = DeepSpeedEngine(
        fakes.tiny_policy(settings, ranks.sequence), ranks, stage, settings.optimizer
    )
    for name, rows in cases.PACKINGS.items():
        fakes.learner(engine, ranks, settings).accumulate(fakes.batch_of(rows, cases.EVERYTHING))
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
    engine = DeepSpeedEngine(fakes.tiny_policy(first, ranks.sequence), ranks, 2, first.optimizer)
    for name, each in chosen.items():
        fakes.learner(engine, ranks, each).accumulate(
            fakes.batch_of(cases.PACKINGS["rows"], cases.EVERYTHING)
        )
        save_gradient(engine, f"algorithm-{name}")


def checkpoint_of(ranks: Ranks) -> dict[str, object]:
    """Two steps, a checkpoint, two more."""
    case = cases.CASES["value head"]
    engine = case.engine(FOLDER, ranks)
    made = RankHarness(
        FOLDER,
        FOLDER / case.model,
        ranks,
        engine,
        fakes.learner(engine, ranks, case.spec.algorithm),
    )
    case.go_on(engine, made.learner, ranks, range(2))
    assert made.save(2)
    return case.go_on(engine, made.learner, ranks, range(2, 4))


def resumed(ranks: Ranks) -> dict[str, object]:
    """The last two steps again, shared rows or not: shards of the optimizer know of ranks alone."""
    case = cases.CASES["value head"]
    made = RankHarness.of(case.spec, FOLDER, ranks, newest(FOLDER))
    return case.go_on(made.engine, made.learner, ranks, range(2, 4))


def main() -> None:
    ports = iter(PORTS)
    results: dict[str, object] = {}
    for stage in (1, 2, 3):
        with join_ranks(place(next(ports))) as ranks:
            gradients(ranks, stage)
    for with_value_head in (False, True):
        with join_ranks(place(next(ports))) as ranks:
            algorithms(ranks, with_value_head=with_value_head)
    for name, case in cases.CASES.items():
        for shared in (True, False):
            with join_ranks(place(next(ports), shared=shared)) as ranks:
                results[f"{name}-{'shared' if shared else 'apart'}"] = case.train(FOLDER, ranks)
    with join_ranks(place(next(ports))) as ranks:
        results["straight"] = checkpoint_of(ranks)
        results["from leader"] = (
            len(ranks.from_leader(bytes(RANK + 5))),
            len(ranks.from_leader(b"" if RANK == 0 else b"x")),
        )
    for shared in (True, False):
        with join_ranks(place(next(ports), shared=shared)) as ranks:
            results[f"resumed-{'shared' if shared else 'apart'}"] = resumed(ranks)
    (FOLDER / f"results-{RANK}.json").write_text(json.dumps(results), encoding="utf-8")


main()
