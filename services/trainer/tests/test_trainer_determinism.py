"""The same seed and the same data give the same numbers to the last bit, on one rank; from process
to process too.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import trainer_fakes as fakes

from pipelinerl_trainer.engine import DeepSpeedEngine
from pipelinerl_trainer.ranks import RankPlacement, join_ranks

NUM_STEPS = 3
PROGRAM = """
import json, sys
import torch
torch.set_num_threads(1)
from pipelinerl_trainer.engine import prepare_environment
prepare_environment(0, 0, 1)
import test_trainer_determinism as test
print(json.dumps({name: test.run(name) for name in sys.argv[1:]}))
"""


def run(name: str) -> list[dict[str, str]]:
    """Every metric of a few optimizer steps, and a sum over all weights, as hexadecimal floats."""
    settings = fakes.full_algorithm(**fakes.ALGORITHMS[name])
    steps = []
    with join_ranks(RankPlacement()) as ranks:
        engine = DeepSpeedEngine(fakes.tiny_policy(settings), ranks, 1, settings.optimizer)
        learner = fakes.learner(engine, ranks, settings)
        for step in range(NUM_STEPS):
            everything = fakes.trajectories(6, seed=20 + step)
            values = fakes.train_step(
                learner, fakes.batch_of([everything[:4], everything[4:]], everything, step)
            )
            weights = math.fsum(
                float(weight.detach().double().sum()) for weight in engine.policy.parameters()
            )
            steps.append(
                {key: value.hex() for key, value in {**values, "weights": weights}.items()}
            )
    return steps


@pytest.mark.parametrize("name", fakes.ALGORITHMS)
def test_the_same_data_gives_bit_equal_losses_and_weights_twice(name: str) -> None:
    first, second = run(name), run(name)
    assert first == second
    assert len({step["loss"] for step in first}) == NUM_STEPS
    assert len({step["weights"] for step in first}) == NUM_STEPS


def test_another_process_gives_the_same_bits() -> None:
    names = ["reinforce", "ppo", "gspo"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {name: run(name) for name in names}
