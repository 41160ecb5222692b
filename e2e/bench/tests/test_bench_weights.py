import argparse
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench import weights
from bench.weights import Measured
from bench.weights_generator import make_model, num_layers
from bench.weights_transfer import Update, read_snapshot
from pipelinerl_common.errors import SettingsError

KEYS = {"pause_over_transfer", "total_over_broadcast", "pause_seconds", "apply_seconds", "bytes"}


def arguments(**changes: object) -> argparse.Namespace:
    defaults = {
        "quick": True,
        "seed": 1,
        "model": None,
        "megabytes": 100,
        "rounds": 1,
        "pace": 100,
        "requests": 2,
        "sharded_megabytes": 20,
    }
    return argparse.Namespace(**{**defaults, "engine": "vllm", **changes})


def test_ratios_are_medians_of_rounds() -> None:
    # Totals 3, 4, 9 over broadcast 1 and apply 1: 1.5, 2, 4.5; pauses 0.2, 0.1, 0.3 over transfers
    # of 1, 2, 1.
    updates = [
        Update(0.2, 1.0, 1.0, 3.0, 2),
        Update(0.1, 2.0, 1.0, 4.0, 2),
        Update(0.3, 1.0, 1.0, 9.0, 1),
    ]
    values = Measured(updates, [1.0, 1.0, 1.0]).values(num_bytes=7)
    assert values["total_over_broadcast"] == 2.0
    assert values["beside_apply_over_broadcast"] == 3.0
    assert values["pause_over_transfer"] == 0.2
    assert values["num_running"] == 1
    assert values["bytes"] == 7


def test_the_model_has_at_least_the_size_that_was_asked_for(tmp_path: Path) -> None:
    assert num_layers(25) == 1
    make_model(tmp_path, 30, seed=1)
    snapshot = read_snapshot(tmp_path)
    assert 30e6 <= snapshot.num_bytes <= 60e6


def test_a_folder_without_a_model_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--model .*no config\.json"):
        weights.bench(arguments(model=tmp_path))


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_weights_bench_updates_a_live_generator_in_both_modes_at_both_paces() -> None:
    values = weights.bench(arguments()).values
    sharded = values["sharded"]
    assert isinstance(sharded, Mapping)
    numbers = {key: float(str(value)) for key, value in sharded.items()}
    assert numbers["sender_imbalance"] <= 0.1
    assert numbers["node_bytes_over_model"] <= 1.3  # headers and the protocol weigh in a small one
    assert numbers["bound_seconds"] < numbers["update_seconds"]
    assert numbers["through_rank0_seconds"] > 0
    for pace in ("paced", "unpaced"):
        modes = values[pace]
        assert isinstance(modes, Mapping)
        for mode in ("staged", "inplace"):
            measured = modes[mode]
            assert isinstance(measured, Mapping)
            assert measured.keys() >= KEYS
            assert 25e6 <= float(str(measured["bytes"])) < 40e6
            assert all(isinstance(value, int | float) and value > 0 for value in measured.values())
    paced = values["paced"]
    assert isinstance(paced, Mapping)
    assert isinstance(paced["inplace"], Mapping)
    assert isinstance(paced["staged"], Mapping)
    assert float(str(paced["staged"]["pause_seconds"])) < float(
        str(paced["inplace"]["pause_seconds"])
    )
