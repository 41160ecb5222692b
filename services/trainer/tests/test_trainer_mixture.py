"""Mixtures of experts: fused in memory, one tensor per expert in the checkpoint and on the way to
the generators.
"""

from pathlib import Path

import pytest
import torch
import trainer_fakes as fakes
from safetensors.torch import load_file, save_file
from test_trainer_gradient import assert_same_gradient, full_gradient
from trainer_harness import RankHarness, setup
from trainer_reference import reference_gradient

from pipelinerl_common.errors import SettingsError
from pipelinerl_trainer.export import export_policy
from pipelinerl_trainer.model import (
    CheckpointTensors,
    PolicyModel,
    check_tensors,
    load_policy,
    stored_shapes,
)
from pipelinerl_trainer.ranks import RankPlacement, join_ranks

KINDS = {
    "qwen3_moe": "model.layers.1.mlp.experts.3.up_proj.weight",
    "mixtral": "model.layers.1.block_sparse_moe.experts.3.w3.weight",
}
EVERYTHING = fakes.trajectories(7)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    fakes.tiny_mixture(request.param).save_pretrained(tmp_path / "model")
    return str(request.param)


@pytest.mark.parametrize("stage", [1, 3])
def test_every_tensor_is_sent_as_the_checkpoint_has_it(
    kind: str, tmp_path: Path, stage: int
) -> None:
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert KINDS[kind] in stored
    with setup(tmp_path, stage) as run:
        sent = run.served()
        assert list(run.engine.served_shapes.items()) == [
            (name, tuple(weight.shape)) for name, weight in sent.items()
        ]
    assert sent.keys() == stored.keys()
    for name, weight in sent.items():
        assert torch.equal(weight, stored[name]), name


@pytest.mark.parametrize("stage", [1, 3])
def test_the_gradient_is_the_plain_one_and_has_no_router_loss(
    kind: str, tmp_path: Path, stage: int
) -> None:
    """The model's configuration asks for a router loss; the plain computation has none."""
    spec = fakes.full_spec(trainers={"zeroStage": stage})
    with join_ranks(RankPlacement()) as ranks:
        made = RankHarness.of(spec, tmp_path, ranks)
        assert made.engine.policy.language_model.config.output_router_logits
        made.learner.accumulate(fakes.batch_of([EVERYTHING[:4], [], EVERYTHING[4:]], EVERYTHING))
        found = full_gradient(made.engine)
    plain = PolicyModel(fakes.tiny_mixture(kind), with_value_head=False)
    plain.language_model.config._experts_implementation = "eager"
    expected = reference_gradient(spec.algorithm, EVERYTHING, plain)
    experts = expected["language_model.model.layers.1.mlp.experts.down_proj"]
    assert (experts.flatten(1).norm(dim=1) > 1e-3).all()  # every expert was needed
    assert_same_gradient(found, expected)


def test_a_trained_mixture_is_exported_and_loads_again(kind: str, tmp_path: Path) -> None:
    with setup(tmp_path, stage=2) as run:
        run.train(range(1))
        (tmp_path / "trained").mkdir()
        export_policy(run.engine, run.ranks, tmp_path / "model", tmp_path / "trained")
        policy = run.engine.policy
        weights = {
            name: weight.detach().clone()
            for name, weight in policy.language_model.named_parameters()
        }
    assert stored_shapes(tmp_path / "trained") == stored_shapes(tmp_path / "model")
    again = load_policy(tmp_path / "trained", fakes.job().spec, torch.device("cpu"))
    before = load_policy(tmp_path / "model", fakes.job().spec, torch.device("cpu"))
    for name, weight in again.language_model.named_parameters():
        assert torch.equal(weight, weights[name]), name
        assert not torch.equal(weight, before.language_model.get_parameter(name)), name


def test_a_checkpoint_without_one_of_the_experts_is_refused(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "model" / "model.safetensors"
    stored = load_file(file)
    del stored[KINDS[kind]]
    save_file(stored, file, metadata={"format": "pt"})
    with pytest.raises(SettingsError, match="cannot be loaded"):
        load_policy(tmp_path / "model", fakes.job().spec, torch.device("cpu"))


def test_weights_that_generators_would_not_know_are_refused(kind: str, tmp_path: Path) -> None:
    stored = stored_shapes(tmp_path / "model")
    model = fakes.tiny_mixture(kind)
    check_tensors(CheckpointTensors(model, stored), model, stored)
    for wrong in (
        stored | {KINDS[kind]: (16, 24)},
        {name: shape for name, shape in stored.items() if name != KINDS[kind]},
    ):
        with pytest.raises(
            SettingsError, match=f"1 weight named or shaped otherwise.*such as {KINDS[kind]}"
        ):
            check_tensors(CheckpointTensors(model, wrong), model, wrong)


def test_experts_that_are_stored_fused_keep_their_names(tmp_path: Path) -> None:
    model = fakes.tiny_mixture("qwen3_moe")
    model.config.save_pretrained(tmp_path)
    save_file(
        {name: weight.detach() for name, weight in model.named_parameters()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    policy = load_policy(tmp_path, fakes.job().spec, torch.device("cpu"))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert dict(policy.tensors.shapes_of(name, (4, 48, 16))) == {name: (4, 48, 16)}
