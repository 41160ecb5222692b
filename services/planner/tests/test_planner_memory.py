"""The memory model against transformers' own models on meta tensors, and what it refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import JobSpec, parse_job
from pipelinerl_planner.memory import (
    GIGABYTE,
    ModelShape,
    full_sequences,
    generator_memory,
    memory_faults,
    trainer_memory,
)

H100 = 85 * GIGABYTE
PAGE = Path(__file__).parents[3] / "docs" / "pages" / "explanation" / "memory.md"

QWEN_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
QWEN_32B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
QWEN_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
SMALL_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
}
QWEN_72B: dict[str, Any] = {
    **QWEN_7B,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
CONFIGS = {
    "dense": QWEN_7B,
    "norms of query and key": QWEN_32B,
    "mixture": QWEN_30B_A3B,
    "tied": SMALL_LLAMA,
}


def spec(**sections: Any) -> JobSpec:
    document = {
        "apiVersion": "pipelinerl.dev/v1alpha1",
        "kind": "PipelineRLJob",
        "metadata": {"name": "sums"},
        "spec": {
            "model": {"uri": "/models/some", "maxModelLen": 8192},
            "task": {"path": "tasks:Sums", "sampling": {"maxTokens": 4096}},
            "actors": {"gpusPerReplica": 1, **sections.pop("actors", {})},
            "trainers": {
                "processesPerNode": 4,
                "microBatchTokens": 12288,
                **sections.pop("trainers", {}),
            },
            **sections,
        },
    }
    return parse_job(document, source="test").spec


def model_on_meta(config: dict[str, Any], **sizes: Any) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {key: value for key, value in {**config, **sizes}.items() if key != "model_type"}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **given),
            dtype=torch.bfloat16,
            attn_implementation="sdpa",
        )


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_number_of_parameters_is_that_of_transformers(config: dict[str, Any]) -> None:
    model = model_on_meta(config)
    assert ModelShape.from_config(config).parameters == model.num_parameters()


def saved_bytes(model: Any, num_tokens: int) -> int:
    """Bytes that autograd keeps for the backward pass of the decoder, weights left out, with
    attention that keeps what a flash kernel keeps.
    """
    import torch

    class Flash(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
            output = torch.empty_like(query)
            spread = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
            ctx.save_for_backward(query, key, value, output, spread)
            return output

    def attention(_: Any, query: Any, key: Any, value: Any, *__: Any, **___: Any) -> Any:
        result = Flash.apply(query, key, value)  # type: ignore[no-untyped-call]
        return result.transpose(1, 2).clone(), None  # as packed rows are put back in order

    from transformers import AttentionInterface

    AttentionInterface.register("fused-kernel", attention)
    model.set_attn_implementation("fused-kernel")
    model.train()
    weights = {each.untyped_storage()._cdata for each in model.parameters()}
    kept: list[Any] = []  # alive, so that no address is used twice
    sizes: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept.append(tensor)
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    ids = torch.zeros(1, num_tokens, dtype=torch.long, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.get_decoder()(
            input_ids=ids,
            position_ids=torch.arange(num_tokens, device="meta")[None],
            use_cache=False,
        )
    return sum(sizes.values())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_activations_of_a_layer_are_those_that_autograd_keeps(config: dict[str, Any]) -> None:
    tokens = 256
    few = {"num_experts": 16} if "num_experts" in config else {}
    one, three = (
        saved_bytes(model_on_meta(config, num_hidden_layers=layers, **few), tokens)
        for layers in (1, 3)
    )
    measured = (three - one) / 2 / tokens
    shape = ModelShape.from_config({**config, **few})
    assert shape.layer_activation_bytes == pytest.approx(measured, rel=0.03)


def test_states_by_zero_stage_are_those_of_deepspeed() -> None:
    """7B on 4 ranks in bfloat16: 84 GB before any activation at stage 1, 46 at 2, 34 at 3."""
    shape = ModelShape.from_config(QWEN_7B)
    states = {}
    for stage in (1, 2, 3):
        parts = trainer_memory(spec(trainers={"zeroStage": stage}), shape).parts
        states[stage] = sum(size for name, size in parts.items() if name in STATES) / GIGABYTE
    assert states == pytest.approx({1: 83.8, 2: 45.7, 3: 34.3}, abs=0.1)


STATES = ("weights", "gradients", "optimizer (float32 weights, two moments)")


def test_without_checkpointing_the_activations_of_a_7b_model_fill_a_gpu() -> None:
    shape = ModelShape.from_config(QWEN_7B)
    stored = trainer_memory(spec(trainers={"activationCheckpointing": False}), shape)
    assert stored.parts["activations"] / GIGABYTE == pytest.approx(80.0, abs=0.5)
    again = trainer_memory(spec(), shape)
    assert again.parts["activations"] / GIGABYTE == pytest.approx(5.3, abs=0.3)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"trainers": {"zeroStage": 1}}, "set trainers.zeroStage=3"),
        (
            {"trainers": {"activationCheckpointing": False}},
            "set trainers.activationCheckpointing=true",
        ),
        ({"trainers": {"microBatchTokens": 131072}}, "lower trainers.microBatchTokens"),
        ({"trainers": {"processesPerNode": 1}}, "take more trainers.replicas"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_setting_that_helps(
    sections: dict[str, Any], says: str
) -> None:
    (fault,) = memory_faults(spec(**sections), ModelShape.from_config(QWEN_7B), H100)
    assert says in fault
    assert "the GPU has 85.0 GB" in fault


@pytest.mark.parametrize(
    ("name", "config", "ranks", "workers"),
    [
        ("7B dense", QWEN_7B, 4, 1),
        ("7B dense", QWEN_7B, 8, 1),
        ("32B dense", QWEN_32B, 16, 4),
        ("30B, 3B active", QWEN_30B_A3B, 16, 2),
        ("72B dense", QWEN_72B, 64, 8),
    ],
)
def test_models_fit_as_the_page_says(
    name: str, config: dict[str, Any], ranks: int, workers: int
) -> None:
    nodes = {"replicas": -(-ranks // 8), "processesPerNode": min(ranks, 8)}
    job = spec(
        actors={"gpusPerReplica": workers, "generator": {"tensorParallelSize": workers}},
        trainers={**nodes, "checkpoint": {"pvc": "claim"}},
    )
    shape = ModelShape.from_config(config)
    assert memory_faults(job, shape, H100) == []
    trainer, generator = trainer_memory(job, shape), generator_memory(job, shape)
    states = sum(trainer.parts[part] for part in STATES)
    sizes = (states, trainer.parts["activations"], trainer.total)
    row = [name, str(ranks), *(f"{size / GIGABYTE:.1f}" for size in sizes), str(workers)]
    row += [f"{generator.total / GIGABYTE:.1f}", str(full_sequences(job, shape, H100))]
    assert f"| {' | '.join(row)} |" in PAGE.read_text()


def test_a_second_copy_of_a_mixture_leaves_no_room_on_one_gpu() -> None:
    shape = ModelShape.from_config(QWEN_30B_A3B)
    faults = memory_faults(spec(), shape, H100)
    assert any("set weightTransfer.mode=inplace" in fault for fault in faults)
    in_place = generator_memory(spec(weightTransfer={"mode": "inplace"}), shape)
    assert in_place.total < H100


def test_the_kv_cache_has_what_the_weights_leave() -> None:
    shape = ModelShape.from_config(QWEN_7B)
    alone = full_sequences(spec(weightTransfer={"mode": "inplace"}), shape, H100)
    staged = full_sequences(spec(), shape, H100)
    # 57,344 bytes a token, 8,192 tokens: 0.47 GB a sequence, and 15.2 GB of a second copy.
    assert alone - staged == pytest.approx(15.2 / 0.4698, abs=1)
    assert full_sequences(spec(), shape, 20 * GIGABYTE) == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda config: config.pop("vocab_size"), "no memory model without 'vocab_size'"),
        (lambda config: config.update(kv_lora_rank=512), "kv_lora_rank is not in the memory model"),
    ],
)
def test_other_architectures_are_named(
    change: Callable[[dict[str, Any]], object], says: str
) -> None:
    config = dict(QWEN_7B)
    change(config)
    with pytest.raises(SettingsError, match=says):
        ModelShape.from_config(config)
