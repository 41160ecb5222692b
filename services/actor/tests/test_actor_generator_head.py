"""`model.headDtype: float32`: logits of a bfloat16 model are computed in float32, and its weights
stay as they are.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from actor_generator_harness import Client, GeneratorProcess, write_job
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

from pipelinerl_actor.generator.engine import EngineOptions
from pipelinerl_actor.models.tiny import make_tiny_model
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import GeneratorSettings

TOKENS = [40 + (7 * index) % 40 for index in range(200)]


def job(folder: Path, head_dtype: str) -> Path:
    path = write_job(folder, engine="transformers")
    document = yaml.safe_load(path.read_text())
    document["spec"]["model"] |= {"dtype": "bfloat16", "headDtype": head_dtype}
    path.write_text(yaml.safe_dump(document))
    return path


def expected(folder: Path) -> torch.Tensor:
    """Log-probabilities of the tokens after the first, the head's product in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        hidden = model.get_decoder()(input_ids=torch.tensor([TOKENS])).last_hidden_state[0, :-1]
        logits = linear(hidden.float(), model.get_output_embeddings().weight.float())
        logprobs: torch.Tensor = logits.log_softmax(-1).gather(
            -1, torch.tensor(TOKENS[1:])[:, None]
        )[:, 0]
    return logprobs


async def scores(folder: Path, head_dtype: str) -> torch.Tensor:
    process = GeneratorProcess(folder, job(folder, head_dtype), "--serve-initial")
    try:
        body = {"sequences": [{"token_ids": TOKENS, "start": 1}], "temperature": 1.0}
        status, answer = await Client(process.url).call("POST", "/v1/score", body)
        assert status == 200, answer
        return torch.tensor(answer["logprobs"][0])
    finally:
        process.kill()


async def test_the_transformers_engine_is_exact_with_a_head_in_float32(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model")
    exact = expected(tmp_path)
    errors = {
        head: float((await scores(tmp_path, head) - exact).abs().mean())
        for head in ("model", "float32")
    }
    assert errors["float32"] < 1e-5
    assert errors["model"] > 1e-4


def options(folder: Path, head_dtype: str, **engine_args: Any) -> EngineOptions:
    generator = GeneratorSettings(engine_args=engine_args, kv_cache_bytes=64 << 20)
    return EngineOptions(
        folder / "model", "bfloat16", head_dtype, 64, generator, 0, can_stage=True, on_cpu=True
    )


@pytest.mark.vllm
def test_vllm_is_told_and_takes_the_head_s_element_type(tmp_path: Path) -> None:
    """By what vLLM itself reads from it: its own body differs from another engine's by more than
    the head's rounding.
    """
    from pipelinerl_actor.generator.vllm_options import engine_args

    make_tiny_model(tmp_path / "model")
    for head_dtype, expected_dtype in (("float32", torch.float32), ("model", torch.bfloat16)):
        arguments = engine_args(options(tmp_path, head_dtype, hf_overrides={"rope_theta": 5000.0}))
        config = arguments.create_model_config()
        assert config.head_dtype == expected_dtype
        assert arguments.hf_overrides["rope_theta"] == 5000.0  # the user's own stay
    for overrides, says in (
        ({"head_dtype": "float32"}, r"use model\.headDtype"),
        ("x", "must be a mapping"),
    ):
        with pytest.raises(SettingsError, match=says):
            engine_args(options(tmp_path, "float32", hf_overrides=overrides))


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["pipeline_parallel_size", "data_parallel_size"])
def test_a_split_that_updates_would_not_reach_is_refused(tmp_path: Path, name: str) -> None:
    from pipelinerl_actor.generator.vllm_options import engine_args

    assert getattr(engine_args(options(tmp_path, "model", **{name: 1})), name) == 1
    with pytest.raises(
        SettingsError, match=rf"engineArgs: {name}=2 is not supported.*tensorParallelSize"
    ):
        engine_args(options(tmp_path, "model", **{name: 2}))


@pytest.mark.vllm
def test_expert_parallelism_is_refused_on_a_cpu_only(tmp_path: Path) -> None:
    from pipelinerl_actor.generator.vllm_options import engine_args

    on_cpu = options(tmp_path, "model", enable_expert_parallel=True)
    with pytest.raises(SettingsError, match="enable_expert_parallel=true crashes on a CPU"):
        engine_args(on_cpu)
    assert engine_args(dataclasses.replace(on_cpu, on_cpu=False)).enable_expert_parallel
