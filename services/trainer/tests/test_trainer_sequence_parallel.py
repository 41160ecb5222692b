"""Ranks that share rows train exactly what one rank trains: gradients, losses, norms, weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_fakes as fakes
import trainer_sequence_cases as cases
from safetensors.torch import load_file
from test_trainer_gradient import assert_same_gradient
from trainer_harness import free_ports, run_two_ranks
from trainer_reference import reference_gradient
from transformers import MambaConfig, Qwen3Config

from pipelinerl_common.errors import SettingsError
from pipelinerl_trainer.model import load_policy
from pipelinerl_trainer.packed import pack_row
from pipelinerl_trainer.ranks import RankPlacement, join_ranks
from pipelinerl_trainer.sequence_parallel import SequenceGroup

CPU = torch.device("cpu")
PROGRAM_S = 300
NUM_PORTS = 3 + 2 + 2 * len(cases.CASES) + 3


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The program's folder and rank 0's results, which rank 1 has too."""
    folder = tmp_path_factory.mktemp("sequence")
    cases.save_models(folder)
    run_two_ranks(
        folder, "trainer_sequence_program.py", [str(folder), *free_ports(NUM_PORTS)], PROGRAM_S
    )
    first, second = (
        json.loads((folder / f"results-{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)
    )
    assert first == second
    return folder, first


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    for now, then in zip(found["metrics"], expected["metrics"], strict=True):
        assert now.keys() == then.keys()
        for name, value in then.items():
            assert now[name] == pytest.approx(value, rel=10 * tolerance, abs=tolerance), name
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weights in expected["weights"].items():
        assert found["weights"][name] == pytest.approx(weights, abs=tolerance), name


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("packing", cases.PACKINGS)
def test_shared_rows_give_the_plain_gradient(
    ran: tuple[Path, dict[str, Any]], stage: int, packing: str
) -> None:
    found = load_file(ran[0] / f"gradient-{stage}-{packing}.safetensors")
    assert_same_gradient(found, reference_gradient(fakes.full_algorithm(), cases.EVERYTHING))


@pytest.mark.parametrize("name", fakes.ALGORITHMS)
def test_shared_rows_give_every_algorithm_the_plain_gradient(
    ran: tuple[Path, dict[str, Any]], name: str
) -> None:
    found = load_file(ran[0] / f"gradient-algorithm-{name}.safetensors")
    assert_same_gradient(
        found,
        reference_gradient(fakes.full_algorithm(**fakes.ALGORITHMS[name]), cases.EVERYTHING),
    )


@pytest.mark.parametrize("name", cases.CASES)
def test_one_rank_two_that_share_and_two_apart_train_alike(
    ran: tuple[Path, dict[str, Any]], name: str
) -> None:
    folder, results = ran
    case = cases.CASES[name]
    with join_ranks(RankPlacement()) as ranks:
        alone = case.train(folder, ranks)
    assert alone["metrics"][0]["num_trained_tokens"] > 0
    assert alone["metrics"][-1]["loss"] != alone["metrics"][0]["loss"]
    assert_same(results[f"{name}-shared"], alone, case.tolerance)
    assert_same(results[f"{name}-apart"], alone, case.tolerance)


def test_a_checkpoint_of_shared_rows_goes_on_with_and_without_them(
    ran: tuple[Path, dict[str, Any]],
) -> None:
    results = ran[1]
    assert results["resumed-shared"] == results["straight"]  # bit by bit
    assert_same(results["resumed-apart"], results["straight"])


def test_the_leader_s_message_reaches_all(ran: tuple[Path, dict[str, Any]]) -> None:
    assert ran[1]["from leader"] == [5, 0]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_slices_cover_every_slot_and_every_trained_token_once(size: int) -> None:
    row, _ = pack_row(fakes.pack(cases.EVERYTHING), CPU)
    slices = [SequenceGroup(index, size).slice_of(row) for index in range(size)]
    num_slots = {len(each.input_ids_C) for each in slices}
    assert len(num_slots) == 1
    ids = torch.cat([each.input_ids_C for each in slices])
    assert torch.equal(ids[: len(row.input_ids_L)], row.input_ids_L)
    positions = torch.cat([each.position_ids_C for each in slices])
    expected = [position for length in slices[0].sequence_lengths for position in range(length)]
    assert positions.tolist() == expected
    assert len(positions) == size * num_slots.pop()
    assert torch.cat([each.scored_U for each in slices]).tolist() == list(
        range(len(row.target_slots_T))
    )
    predicting = [
        each.predicting_slots_U + index * len(each.input_ids_C) for index, each in enumerate(slices)
    ]
    assert torch.equal(torch.cat(predicting), row.target_slots_T - 1)


def test_a_slice_by_hand() -> None:
    """The docstring's example: two sequences of 5 and 2 tokens, filled up to 8 slots."""
    row, _ = pack_row(fakes.pack([_trajectory([1, 2, 3, 4, 5], 2), _trajectory([6, 7], 1)]), CPU)
    assert row.target_slots_T.tolist() == [2, 3, 4, 6]
    mine = SequenceGroup(1, 2).slice_of(row)
    assert mine.input_ids_C.tolist() == [5, 6, 7, 0]
    assert mine.position_ids_C.tolist() == [4, 0, 1, 0]
    assert mine.sequence_lengths == (5, 2, 1)
    assert (mine.scored_U.tolist(), mine.predicting_slots_U.tolist()) == ([3], [1])
    first = SequenceGroup(0, 2).slice_of(row)
    assert (first.scored_U.tolist(), first.predicting_slots_U.tolist()) == ([0, 1, 2], [1, 2, 3])


def _trajectory(tokens: list[int], num_prompt: int) -> fakes.Trajectory:
    column = [0.5] * (len(tokens) - num_prompt)
    return fakes.Trajectory(tokens, num_prompt, column, column, column, column)


@pytest.mark.parametrize(
    ("size", "says"),
    [
        (3, "sequenceParallelSize=3 does not divide the model's 4 attention heads"),
        (8, "sequenceParallelSize=8 does not divide the model's 4 attention heads"),
    ],
)
def test_a_model_whose_heads_cannot_be_shared_out_is_refused(
    tmp_path: Path, size: int, says: str
) -> None:
    fakes.save_tiny_model(tmp_path)
    with pytest.raises(SettingsError, match=says):
        load_policy(tmp_path, fakes.job().spec, CPU, SequenceGroup(0, size))


def test_a_model_with_layers_that_are_not_attention_is_refused() -> None:
    for config in (
        Qwen3Config(layer_types=["linear_attention"], num_hidden_layers=1),
        MambaConfig(),
    ):
        SequenceGroup().check_model(config)
        with pytest.raises(
            SettingsError,
            match="=2: in the model's layers of linear_attention tokens would not see",
        ):
            SequenceGroup(0, 2).check_model(config)


def test_key_value_heads_that_can_neither_be_shared_nor_repeated_are_refused(
    tmp_path: Path,
) -> None:
    fakes.save_tiny_model(tmp_path, num_attention_heads=12, num_key_value_heads=6)
    load_policy(tmp_path, fakes.job().spec, CPU, SequenceGroup(0, 12))
    with pytest.raises(
        SettingsError, match="the model's 6 key-value heads can neither be shared out among 4 ranks"
    ):
        load_policy(tmp_path, fakes.job().spec, CPU, SequenceGroup(0, 4))
