"""Low-rank adapters: only they are trained and served, and they are merged on export."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_fakes as fakes
from deepspeed.utils import safe_get_full_grad
from peft import PeftModel
from safetensors.torch import load_file
from trainer_harness import RankHarness, newest, setup
from trainer_reference import reference_gradient
from transformers import AutoModelForCausalLM

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import AdapterSettings
from pipelinerl_trainer.adapter import AdaptedLinear, Adapter
from pipelinerl_trainer.checkpoint import Checkpoint
from pipelinerl_trainer.engine import DeepSpeedEngine
from pipelinerl_trainer.export import export_final
from pipelinerl_trainer.model import load_policy
from pipelinerl_trainer.packed import pack_row
from pipelinerl_trainer.ranks import RankPlacement, join_ranks

EVERYTHING = fakes.trajectories(7)
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TOLERANCE = 1e-5


@contextmanager
def adapted(
    folder: Path,
    stage: int = 1,
    checkpoint: Checkpoint | None = None,
    *,
    dtype: str = "float32",
    adapter: Mapping[str, Any] = fakes.ADAPTER,
    **algorithm: Any,
) -> Iterator[RankHarness]:
    """One rank with adapters on the tiny model."""
    model = {"dtype": dtype, "adapter": adapter}
    algorithm = {"optimizer": {"learningRate": 1e-2}, **algorithm}
    with setup(folder, stage, checkpoint, model=model, algorithm=algorithm) as made:
        yield made


def frozen_weights(run: RankHarness) -> dict[str, torch.Tensor]:
    """The language model's own weights; whole ones below ZeRO 3 only."""
    return {name: weight.detach().clone() for name, weight in run.engine.policy.model_parameters()}


# The layer


def test_an_adapted_layer_by_hand() -> None:
    frozen = torch.nn.Linear(2, 2, bias=True)
    with torch.no_grad():
        frozen.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        frozen.bias.copy_(torch.tensor([0.5, -0.5]))
    layer: Any = AdaptedLinear(frozen.requires_grad_(requires_grad=False), rank=1, scale=0.5)
    with torch.no_grad():
        layer.lora_A.weight.copy_(torch.tensor([[1.0, -1.0]]))
        layer.lora_B.weight.copy_(torch.tensor([[2.0], [0.5]]))
    y = layer(torch.tensor([[3.0, 1.0]]))
    # W x + b = (5.5, 12.5); A x = 2; B A x = (4, 1), half of it is added.
    assert torch.equal(y, torch.tensor([[7.5, 13.0]]))
    y.sum().backward()
    # d/dB = scale (1, 1)^T A x; d/dA = scale (B^T (1, 1)) x
    assert torch.equal(layer.lora_B.weight.grad, torch.tensor([[1.0], [1.0]]))
    assert torch.equal(layer.lora_A.weight.grad, torch.tensor([[3.75, 1.25]]))
    assert layer.weight.grad is None
    assert layer.bias.grad is None


def attach(targets: list[str] | None = None, seed: int = 0, rank: int = 4) -> Adapter:
    return Adapter.attach(
        fakes.tiny_model(), AdapterSettings(rank=rank, alpha=8, target_modules=targets), seed
    )


def test_by_default_every_linear_layer_of_the_decoder_and_not_the_head_has_one() -> None:
    adapter = attach()
    assert [name.rpartition(".")[2] for name in adapter.layers] == 2 * list(ALL)
    assert set(adapter.targets) == set(ALL)
    assert all(name.startswith("model.layers.") for name in adapter.layers)


def test_targets_are_names_or_their_ends() -> None:
    assert list(attach(["v_proj", "layers.1.mlp.up_proj"]).layers) == [
        "model.layers.0.self_attn.v_proj",
        "model.layers.1.self_attn.v_proj",
        "model.layers.1.mlp.up_proj",
    ]
    one = attach(["model.layers.0.self_attn.v_proj"])
    assert one.targets == (
        "model.layers.0.self_attn.v_proj",
    )  # the last part alone would pick another layer too


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("qproj", "is called qproj; near it are q_proj"),
        ("gate_up_proj", "near it are gate_proj, up_proj"),
        ("lm_head", "there are q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"),
        ("proj", "is called proj; "),
    ],
)
def test_a_target_that_is_none_is_named_with_the_near_ones(target: str, says: str) -> None:
    with pytest.raises(SettingsError, match=f"model.adapter.targetModules: .*{says}"):
        attach(["q_proj", target])


def test_the_seed_decides_and_training_begins_at_the_model_itself() -> None:
    one, same, other = (dict(attach(seed=seed).parameters()) for seed in (1, 1, 2))
    for name, parameter in one.items():
        assert torch.equal(parameter, same[name])
        assert torch.equal(parameter, torch.zeros_like(parameter)) is ("lora_B" in name)
    assert not torch.equal(next(iter(one.values())), next(iter(other.values())))
    row, _ = pack_row(fakes.pack(EVERYTHING), torch.device("cpu"))
    plain, adapted = fakes.tiny_policy(fakes.algorithm()), fakes.tiny_policy(fakes.algorithm())
    Adapter.attach(adapted.language_model, AdapterSettings(), seed=0)
    assert torch.equal(plain(row).logprobs_T, adapted(row).logprobs_T)


# The gradient


def set_b(adapter: Adapter) -> None:
    """B that is not 0, so that A has a gradient too."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in adapter.parameters():
            if "lora_B" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def expected_gradient() -> dict[str, torch.Tensor]:
    """By the chain rule from the gradient of the merged weight W: dA = s B^T dW, dB = s dW A^T."""
    settings = fakes.full_algorithm()
    policy = fakes.tiny_policy(settings)
    adapter = Adapter.attach(policy.language_model, AdapterSettings(**fakes.ADAPTER), seed=0)
    set_b(adapter)
    parts = {name: parameter.detach().clone() for name, parameter in adapter.parameters()}
    dense = fakes.tiny_policy(settings)
    dense.language_model.load_state_dict(
        {name: adapter.merged(name, weight) for name, weight in policy.model_parameters()}, False
    )
    gradient = reference_gradient(settings, EVERYTHING, dense)
    found = {}
    for layer in adapter.layers:
        d_weight = gradient[f"language_model.{layer}.weight"]
        a, b = parts[f"{layer}.lora_A.weight"], parts[f"{layer}.lora_B.weight"]
        found[f"{layer}.lora_A.weight"] = 1.5 * b.T @ d_weight
        found[f"{layer}.lora_B.weight"] = 1.5 * d_weight @ a.T
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "activation checkpointing"])
def test_only_adapters_have_gradients_and_theirs_are_the_chain_rule_s(
    tmp_path: Path, stage: int, checkpointing: bool
) -> None:
    spec = fakes.job(
        model={"adapter": fakes.ADAPTER}, trainers={"activationCheckpointing": checkpointing}
    ).spec
    settings = fakes.full_algorithm()
    fakes.save_tiny_model(tmp_path)
    with join_ranks(RankPlacement()) as ranks:
        policy = load_policy(tmp_path, spec, ranks.device)
        assert policy.adapter is not None
        set_b(policy.adapter)
        made = DeepSpeedEngine(policy, ranks, stage, settings.optimizer)
        rows = [EVERYTHING[5:], [], EVERYTHING[2:5], EVERYTHING[:2]]
        fakes.learner(made, ranks, settings).accumulate(fakes.batch_of(rows, EVERYTHING))
        found = {name: safe_get_full_grad(weight) for name, weight in policy.adapter.parameters()}
        assert all(
            safe_get_full_grad(weight) is None
            for _, weight in policy.model_parameters()
            if not weight.requires_grad
        )
        assert not any(weight.requires_grad for _, weight in policy.model_parameters())
        found = {name: gradient.clone() for name, gradient in found.items()}
    expected = expected_gradient()
    assert set(found) == set(expected)
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 0.1
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, atol=TOLERANCE, rtol=TOLERANCE, msg=f"the gradient of {name}"
        )


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frozen_weights_keep_every_bit_and_only_adapters_are_optimized(
    tmp_path: Path, stage: int, dtype: str
) -> None:
    with adapted(tmp_path, stage, dtype=dtype) as run:
        frozen, served = frozen_weights(run), run.served()
        run.train(range(20))
        assert all(
            torch.equal(weight, frozen[name]) for name, weight in frozen_weights(run).items()
        )
        moved = run.served()
        assert all(not torch.equal(weight, served[name]) for name, weight in moved.items())
        assert all(
            weight.dtype == getattr(torch, dtype) for weight in (*moved.values(), *frozen.values())
        )
        masters = [
            tensor
            for name, tensor in run.engine.optimizer_tensors().items()
            if name.endswith("master")
        ]
        num_trained = sum(weight.numel() for weight in served.values())
        assert (
            num_trained <= sum(master.numel() for master in masters) < num_trained + 64
        )  # DeepSpeed pads


def test_with_zero_3_the_frozen_weights_stay_and_the_adapter_is_that_of_zero_1(
    tmp_path: Path,
) -> None:
    found = {}
    for stage in (1, 3):
        with adapted(tmp_path, stage) as run:
            run.train(range(3))
            found[stage] = (
                run.served(),
                {name: weight.clone() for name, weight in run.engine.model_weights()},
            )
    for one, three in zip(found[1], found[3], strict=True):
        assert list(one) == list(three)
        for name, weight in one.items():
            torch.testing.assert_close(
                three[name], weight, atol=TOLERANCE, rtol=TOLERANCE, msg=name
            )
    original = load_file(tmp_path / "model" / "model.safetensors")
    changed = {
        f"model.layers.{layer}.{kind}.weight"
        for layer in (0, 1)
        for kind in ("mlp.up_proj", "self_attn.q_proj")
    }
    merged = found[3][1]
    assert {name for name in changed if torch.equal(merged[name], original[name])} == set()
    assert torch.equal(merged["model.embed_tokens.weight"], original["model.embed_tokens.weight"])


def test_a_value_head_is_trained_beside_the_adapter(tmp_path: Path) -> None:
    with adapted(tmp_path, baseline="value") as run:
        assert run.engine.policy.value_head is not None
        run.train(range(2))
        assert float(run.engine.policy.value_head.weight.detach().abs().max()) > 0
        assert not any("value_head" in name for name in run.served())
        assert run.save(2)
        second = run.train(range(2, 4))
    with adapted(tmp_path, checkpoint=newest(tmp_path), baseline="value") as run:
        assert run.train(range(2, 4)) == second


def test_what_is_served_is_the_adapter_alone(tmp_path: Path) -> None:
    with adapted(tmp_path, adapter={"rank": 2, "targetModules": ["q_proj", "v_proj"]}) as run:
        assert {
            name: tuple(weight.shape) for name, weight in run.served().items()
        } == run.engine.served_shapes
        assert run.engine.served_shapes["model.layers.1.self_attn.q_proj.lora_A.weight"] == (2, 16)
        assert run.engine.served_shapes["model.layers.1.self_attn.q_proj.lora_B.weight"] == (32, 2)
        assert len(run.engine.served_shapes) == 8
        assert sum(weight.numel() for weight in run.served().values()) == 2 * (
            2 * 16 + 32 * 2 + 2 * 16 + 16 * 2
        )
        assert set(run.engine.model_shapes) == set(
            load_file(tmp_path / "model" / "model.safetensors")
        )


# Checkpoints and exports


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [(1, "float32"), (2, "float32"), (3, "float32"), (1, "bfloat16"), (3, "bfloat16")],
)
def test_a_resumed_run_goes_on_bit_by_bit(tmp_path: Path, stage: int, dtype: str) -> None:
    with adapted(tmp_path, stage, dtype=dtype) as run:
        run.train(range(2))
        assert run.save(2)
        straight, served = run.train(range(2, 4)), run.served()
    with adapted(tmp_path, stage, newest(tmp_path), dtype=dtype) as run:
        assert run.train(range(2, 4)) == straight
        for name, weight in run.served().items():
            assert torch.equal(weight, served[name]), name


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"adapter": {"rank": 8, "alpha": 6}}, "adapter {'rank': 4, .* now"),
        ({"adapter": {"rank": 4, "alpha": 7}}, "'alpha': 6.0, .* 'alpha': 7.0"),
        (
            {"adapter": {"rank": 4, "alpha": 6, "targetModules": ["q_proj"]}},
            r"'targets': \['q_proj'\]",
        ),
    ],
)
def test_a_checkpoint_of_another_adapter_is_refused(
    tmp_path: Path, changed: dict[str, Any], says: str
) -> None:
    with adapted(tmp_path) as run:
        run.train(range(1))
        assert run.save(1)
    with (
        pytest.raises(SettingsError, match=says),
        adapted(tmp_path, checkpoint=newest(tmp_path), **changed),
    ):
        pass


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "targets", [None, ["q_proj", "layers.1.mlp.down_proj"]], ids=["all", "some"]
)
def test_the_export_is_the_merged_model_and_peft_loads_the_adapter(
    tmp_path: Path, dtype: str, targets: list[str] | None
) -> None:
    adapter = {"rank": 4, "alpha": 6, **({"targetModules": targets} if targets else {})}
    with adapted(tmp_path, dtype=dtype, adapter=adapter) as run:
        run.train(range(3))
        assert run.save(3)
        export_final(run.engine, run.ranks, tmp_path / "model", tmp_path / "final")
        row, _ = pack_row(fakes.pack(EVERYTHING[:1], temperature=1.0), torch.device("cpu"))
        logprobs = run.engine.score_only(row).logprobs_T
        served = run.served()
    checkpoint = newest(tmp_path).folder
    for model, saved in (
        (tmp_path / "final", tmp_path / "final" / "adapter"),
        (checkpoint / "model", checkpoint / "adapter"),
    ):
        merged = AutoModelForCausalLM.from_pretrained(model)
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=getattr(torch, dtype))
        before = base.model.layers[1].mlp.down_proj.weight.clone()
        loaded = PeftModel.from_pretrained(base, saved)
        tensors = load_file(saved / "adapter_model.safetensors")
        assert {f"base_model.model.{name}" for name in served} == set(tensors)
        tokens, start = torch.tensor([EVERYTHING[0].tokens]), EVERYTHING[0].num_prompt
        for kind, other in {"peft": loaded, "merged": merged}.items():
            with torch.no_grad():
                logits = other(input_ids=tokens).logits[0, start - 1 : -1].float()
            found = logits.log_softmax(-1).gather(-1, tokens[0, start:, None])[:, 0]
            tolerance = 1e-5 if dtype == "float32" else 0.05
            torch.testing.assert_close(found, logprobs, atol=tolerance, rtol=tolerance, msg=kind)
        loaded.merge_and_unload()
        assert not torch.equal(base.model.layers[1].mlp.down_proj.weight, before)
        if dtype == "float32":
            torch.testing.assert_close(
                base.model.layers[1].mlp.down_proj.weight,
                merged.model.layers[1].mlp.down_proj.weight,
                atol=1e-6,
                rtol=1e-6,
            )
    config = json.loads((tmp_path / "final" / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (
        4,
        6.0,
        "tiny://arithmetic",
    )


# Settings


def test_dropout_is_refused_with_the_reason() -> None:
    with pytest.raises(
        SettingsError, match=r"dropout is not offered: generators sample without it"
    ):
        fakes.job(model={"adapter": {"dropout": 0.1}})


@pytest.mark.parametrize(
    ("adapter", "says"),
    [
        ({"rank": 0}, "model.adapter.rank"),
        ({"alpha": 0}, "model.adapter.alpha"),
        ({"targetModules": []}, "model.adapter.targetModules"),
        ({"targetModule": ["q_proj"]}, "model.adapter.targetModule"),
    ],
)
def test_bad_values_are_named(adapter: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        fakes.job(model={"adapter": adapter})
