"""The gradient is that of the plainest computation, whatever the packing, the ranks, the
accumulation and the ZeRO stage.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_fakes as fakes
from deepspeed.utils import safe_get_full_grad
from safetensors.torch import load_file
from trainer_harness import RankHarness, free_ports, run_two_ranks, setup
from trainer_reference import reference_gradient

from pipelinerl_common.errors import FatalError
from pipelinerl_common.settings import AlgorithmSettings
from pipelinerl_trainer.engine import DeepSpeedEngine
from pipelinerl_trainer.learner import MAX_SKIPPED_IN_A_ROW, RankBatch
from pipelinerl_trainer.model import PolicyModel, load_policy
from pipelinerl_trainer.packed import pack_row
from pipelinerl_trainer.ranks import RankPlacement, join_ranks

TOLERANCE = 1e-5
PROGRAM_S = 150
EVERYTHING = fakes.trajectories(7)


def assert_same_gradient(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert (
        max(float(gradient.abs().max()) for gradient in expected.values()) > 0.1
    )  # the comparison means something
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, atol=TOLERANCE, rtol=TOLERANCE, msg=f"the gradient of {name}"
        )


def full_gradient(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    return {
        name: safe_get_full_grad(weight).clone()
        for name, weight in engine.policy.named_parameters()
    }


def gradient_of(
    settings: AlgorithmSettings, rows: list[list[fakes.Trajectory]], stage: int
) -> dict[str, torch.Tensor]:
    with join_ranks(RankPlacement()) as ranks:
        engine = DeepSpeedEngine(fakes.tiny_policy(settings), ranks, stage, settings.optimizer)
        fakes.learner(engine, ranks, settings).accumulate(fakes.batch_of(rows, EVERYTHING))
        return full_gradient(engine)


@pytest.mark.parametrize("name", fakes.ALGORITHMS)
def test_every_algorithm_gives_the_plain_gradient(name: str) -> None:
    settings = fakes.full_algorithm(**fakes.ALGORITHMS[name])
    found = gradient_of(settings, [EVERYTHING[5:], [], EVERYTHING[2:5], EVERYTHING[:2]], stage=1)
    assert_same_gradient(found, reference_gradient(settings, EVERYTHING))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "rows",
    [
        [EVERYTHING],
        [[member] for member in EVERYTHING],
        [EVERYTHING[5:], [], EVERYTHING[2:5], EVERYTHING[:2]],
    ],
    ids=["one row", "a row each", "other neighbours and a filler"],
)
def test_packing_and_accumulation_change_nothing(
    stage: int, rows: list[list[fakes.Trajectory]]
) -> None:
    settings = fakes.full_algorithm()
    assert_same_gradient(
        gradient_of(settings, rows, stage), reference_gradient(settings, EVERYTHING)
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("normalize_by", ["sequences", "tokens"])
def test_a_batch_that_comes_in_parts_gives_the_plain_gradient(
    stage: int, normalize_by: str
) -> None:
    """Also after an earlier assembly of it was given up half-way, and whatever was believed of its
    size before the end.
    """
    settings = fakes.full_algorithm(normalizeBy=normalize_by)
    parts = fakes.parts_of([EVERYTHING[5:], [], EVERYTHING[2:5], EVERYTHING[:2]], EVERYTHING)
    with join_ranks(RankPlacement()) as ranks:
        engine = DeepSpeedEngine(fakes.tiny_policy(settings), ranks, stage, settings.optimizer)
        learner = fakes.learner(engine, ranks, settings)
        before = {name: weight.clone() for name, weight in engine.served_weights()}
        assert learner.train(parts[0], fakes.replaced_after(parts[:2])) is None
        for name, weight in engine.served_weights():
            assert torch.equal(weight, before[name])
        plan, metrics = learner.accumulate_parts(parts)
        found = full_gradient(engine)
        whole = fakes.learner(engine, ranks, settings)
        engine.apply(learning_rate=0.0)
        expected = whole.accumulate(fakes.batch_of([EVERYTHING], EVERYTHING))
    assert_same_gradient(found, reference_gradient(settings, EVERYTHING))
    assert (plan.provisional, plan.num_sequences) == (False, len(EVERYTHING))
    assert metrics.loss.value == pytest.approx(expected.loss.value, rel=1e-4)


def test_parts_are_scaled_right_with_half_precision_weights() -> None:
    """Gradients are accumulated in float32 under another optimizer class then."""
    settings = fakes.full_algorithm(normalizeBy="tokens")
    rows = [EVERYTHING[:4], EVERYTHING[4:]]
    found = []
    for is_streamed in (True, False):
        with join_ranks(RankPlacement()) as ranks:
            model = fakes.tiny_model().to(torch.bfloat16)
            engine = DeepSpeedEngine(
                PolicyModel(model, with_value_head=False), ranks, 1, settings.optimizer
            )
            learner = fakes.learner(engine, ranks, settings)
            if is_streamed:
                learner.accumulate_parts(fakes.parts_of(rows, EVERYTHING))
            else:
                learner.accumulate(fakes.batch_of(rows, EVERYTHING))
            found.append(full_gradient(engine))
    streamed, whole = found
    for name, gradient in whole.items():
        difference = float((streamed[name] - gradient).norm() / gradient.norm())
        assert difference < 0.02, f"the gradient of {name} differs by {difference:.3f}"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    fakes.save_tiny_model(folder / "model")
    for kind in ("qwen3_moe", "mixtral"):
        fakes.tiny_mixture(kind).save_pretrained(folder / kind)
    run_two_ranks(folder, "trainer_rank_program.py", ["2", str(folder), *free_ports(16)], PROGRAM_S)
    return folder, json.loads((folder / "results.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("packing", ["even", "uneven", "streamed"])
def test_two_ranks_give_the_plain_gradient(
    two_ranks: tuple[Path, dict[str, Any]], stage: int, packing: str
) -> None:
    folder, _ = two_ranks
    found = load_file(folder / f"gradient-{stage}-{packing}.safetensors")
    assert_same_gradient(found, reference_gradient(fakes.full_algorithm(), EVERYTHING))


@pytest.mark.parametrize("name", fakes.ALGORITHMS)
def test_two_ranks_give_every_algorithm_the_plain_gradient(
    two_ranks: tuple[Path, dict[str, Any]], name: str
) -> None:
    folder, _ = two_ranks
    found = load_file(folder / f"gradient-algorithm-{name}.safetensors")
    assert_same_gradient(
        found, reference_gradient(fakes.full_algorithm(**fakes.ALGORITHMS[name]), EVERYTHING)
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks_resume_bit_by_bit(two_ranks: tuple[Path, dict[str, Any]], stage: int) -> None:
    _, results = two_ranks
    straight, resumed = results[f"straight-{stage}"], results[f"resumed-{stage}"]
    assert straight["saved"]
    for before, after in zip(straight["second"], resumed["second"], strict=True):
        assert {**before, "skipped_steps_total": 0} == {**after, "skipped_steps_total": 0}
    assert straight["weights"] == resumed["weights"]
    assert straight["second"][1]["loss"] != straight["first"][1]["loss"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_number_that_is_not_one_on_one_rank_skips_the_step_on_all(
    two_ranks: tuple[Path, dict[str, Any]], stage: int
) -> None:
    _, results = two_ranks
    assert results[f"straight-{stage}"]["skipped"] == {
        "unchanged": True,
        "skipped": 1.0,
        "has_norm": False,
    }


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_number_that_is_not_one_skips_the_step_with_half_precision_weights_too(
    tmp_path: Path, stage: int
) -> None:
    batch = fakes.batch_of([EVERYTHING[:4], EVERYTHING[4:]], EVERYTHING)
    row = batch.micro_batches[0]
    row.advantages_L[row.loss_mask_L == 1] = float("nan")
    with setup(tmp_path, stage, model={"dtype": "bfloat16"}) as run:
        before = run.served()
        assert fakes.train_step(run.learner, batch)["skipped_steps_total"] == 1
        assert all(torch.equal(weight, before[name]) for name, weight in run.served().items())
        assert (
            fakes.train_step(run.learner, fakes.batch_of([EVERYTHING], EVERYTHING))[
                "skipped_steps_total"
            ]
            == 1
        )
        assert any(not torch.equal(weight, before[name]) for name, weight in run.served().items())


def test_stages_train_alike(two_ranks: tuple[Path, dict[str, Any]]) -> None:
    _, results = two_ranks
    losses = [
        [step["loss"] for step in results[f"straight-{stage}"]["second"]] for stage in (1, 2, 3)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("case", ["1", "2", "3", "qwen3_moe", "mixtral"])
def test_each_rank_has_an_even_share_of_what_generators_get(
    two_ranks: tuple[Path, dict[str, Any]], case: str
) -> None:
    """Nothing is missing, nothing twice, and no rank keeps more than its part of the model."""
    _, results = two_ranks
    found = results[f"shares-{case}"]
    assert found["is_same"]
    assert found["is_complete"]
    assert max(found["bytes"]) <= 1.1 * min(found["bytes"])


def test_ranks_agree_on_the_highest_vote_and_on_the_same_batch_only(
    two_ranks: tuple[Path, dict[str, Any]],
) -> None:
    _, results = two_ranks
    assert results["replaced"] == {"replaced": True, "unchanged": True}
    assert results["votes"] == ["READY", "WAIT", "WAIT", "STOP"]
    assert results["pulled"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks_train_the_adapter_that_one_trains(
    two_ranks: tuple[Path, dict[str, Any]], stage: int
) -> None:
    folder, _ = two_ranks
    spec = fakes.full_spec(model={"adapter": fakes.ADAPTER})
    with join_ranks(RankPlacement()) as ranks:
        made = RankHarness.of(spec, folder, ranks)
        before = made.served()
        for step in range(4):
            everything = fakes.trajectories(6, seed=10 + step)
            fakes.train_step(
                made.learner, fakes.batch_of([everything[:3], everything[3:]], everything, step)
            )
        expected = made.served()
    found = load_file(folder / f"adapter-{stage}.safetensors")
    assert set(found) == set(expected)
    assert (
        min(float((weight - before[name]).abs().max()) for name, weight in expected.items()) > 1e-3
    )
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=TOLERANCE, rtol=0, msg=name)


def test_two_ranks_resume_an_adapter_bit_by_bit(two_ranks: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = two_ranks
    straight, resumed = (
        load_file(folder / f"adapter-{name}3.safetensors") for name in ("", "resumed-")
    )
    assert all(torch.equal(weight, straight[name]) for name, weight in resumed.items())
    assert set(straight) == set(resumed)


@pytest.mark.parametrize("stage", [1, 3])
def test_activation_checkpointing_changes_nothing(tmp_path: Path, stage: int) -> None:
    spec = fakes.full_spec(trainers={"activationCheckpointing": True, "zeroStage": stage})
    fakes.save_tiny_model(tmp_path / "model")
    with join_ranks(RankPlacement()) as ranks:
        made = RankHarness.of(spec, tmp_path, ranks)
        assert made.engine.policy.language_model.is_gradient_checkpointing
        made.learner.accumulate(fakes.batch_of([EVERYTHING[:4], EVERYTHING[4:]], EVERYTHING))
        found = full_gradient(made.engine)
    assert_same_gradient(found, reference_gradient(spec.algorithm, EVERYTHING))


def test_dropout_of_the_checkpoint_is_off(tmp_path: Path) -> None:
    fakes.save_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    policy = load_policy(tmp_path, fakes.job().spec, torch.device("cpu"))
    assert policy.training
    row, _ = pack_row(fakes.pack(EVERYTHING), torch.device("cpu"))
    torch.testing.assert_close(policy(row).logprobs_T, policy(row).logprobs_T, rtol=0, atol=0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_that_are_no_longer_finite_end_the_process_at_the_step_that_made_them(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = fakes.full_algorithm()
    with join_ranks(RankPlacement()) as ranks:
        engine = DeepSpeedEngine(fakes.tiny_policy(settings), ranks, stage, settings.optimizer)
        learner = fakes.learner(engine, ranks, settings)
        fakes.train_step(learner, fakes.batch_of([EVERYTHING], EVERYTHING, 0))
        monkeypatch.setattr("pipelinerl_trainer.learner.learning_rate", lambda *_: float("inf"))
        with pytest.raises(
            FatalError,
            match=r"step 1: .* not finite, .* a learning rate of inf: lower algorithm\.optimizer",
        ):
            fakes.train_step(learner, fakes.batch_of([EVERYTHING], EVERYTHING, 1))


def spoiled(batch: RankBatch) -> RankBatch:
    for row in batch.micro_batches:
        row.advantages_L[row.loss_mask_L == 1] = float("nan")
    return batch


def test_a_run_whose_gradients_stay_not_finite_ends() -> None:
    """One step with a finite gradient in between restarts the count."""
    settings = fakes.full_algorithm()
    with join_ranks(RankPlacement()) as ranks:
        engine = DeepSpeedEngine(fakes.tiny_policy(settings), ranks, 1, settings.optimizer)
        learner = fakes.learner(engine, ranks, settings)
        few = EVERYTHING[:1]
        for step in range(2):
            fakes.train_step(learner, spoiled(fakes.batch_of([few], few, step)))
        fakes.train_step(learner, fakes.batch_of([few], few, 2))
        for step in range(3, MAX_SKIPPED_IN_A_ROW + 2):
            fakes.train_step(learner, spoiled(fakes.batch_of([few], few, step)))
        with pytest.raises(
            FatalError,
            match=f"{MAX_SKIPPED_IN_A_ROW} steps in a row had a gradient that is not finite",
        ):
            fakes.train_step(learner, spoiled(fakes.batch_of([few], few, MAX_SKIPPED_IN_A_ROW + 2)))
        assert learner.num_skipped_steps == 2 + MAX_SKIPPED_IN_A_ROW
