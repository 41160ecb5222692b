"""Mixtures of experts in vLLM, which fuses the experts' projections: every update must reach every
expert of every layer.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from actor_generator_harness import (
    CLOSE,
    Client,
    GeneratorProcess,
    Trainer,
    Weights,
    difference,
    manifest_of,
    running,
    write_job,
)
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from pipelinerl_actor.generator.service import make_engine
from pipelinerl_actor.models.tiny import END_ID, VOCAB_SIZE, make_tokenizer
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import GeneratorSettings, load_job

PROMPT = [(7 + 37 * index) % 120 for index in range(120)]
"""Every token once, so that every expert is chosen for some."""
NUM_EXPERTS = 4
WEIGHTS_FILE = "model.safetensors"
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": END_ID,
    "initializer_range": 0.2,
}


def make_mixture(kind: str, folder: Path) -> Path:
    torch.manual_seed(0)
    model: Any
    if kind == "mixtral":
        model = MixtralForCausalLM(
            MixtralConfig(**SHAPE, num_local_experts=NUM_EXPERTS, intermediate_size=64)
        )
    else:
        experts = {
            "num_experts": NUM_EXPERTS,
            "moe_intermediate_size": 64,
            "intermediate_size": 128,
            "norm_topk_prob": True,
        }
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE | experts))
    model.float().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@dataclass
class Mixture:
    """The same model in transformers, by the checkpoint's names."""

    folder: Path

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return dict(load_file(self.folder / WEIGHTS_FILE))

    def random(self, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {
            name: weight + 0.05 * torch.randn(weight.shape, generator=generator)
            for name, weight in self.weights.items()
        }

    @torch.no_grad()
    def logprobs(self, weights: Weights, sampled: list[int], scratch: Path) -> list[float]:
        """Log-probabilities of tokens sampled after PROMPT. Every expert of every layer takes part,
        or they would show nothing of it.
        """
        (scratch / "config.json").write_text((self.folder / "config.json").read_text())
        save_file(dict(weights), scratch / WEIGHTS_FILE, metadata={"format": "pt"})
        model: Any = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32).eval()
        chosen: dict[str, set[int]] = {}
        for name, module in model.named_modules():
            if name.endswith(".mlp.gate"):
                module.register_forward_hook(
                    lambda _, __, output, name=name: chosen.setdefault(name, set()).update(
                        output[2].flatten().tolist()
                    )
                )
        logits = model(torch.tensor([PROMPT + sampled])).logits[0, len(PROMPT) - 1 : -1]
        assert list(chosen.values()) == [set(range(NUM_EXPERTS))] * 2
        expected: list[float] = (
            logits.log_softmax(-1).gather(-1, torch.tensor(sampled)[:, None])[:, 0].tolist()
        )
        return expected


@pytest.fixture(
    params=[("qwen3_moe", 1), ("mixtral", 1), ("qwen3_moe", 2)],
    ids=["qwen3_moe", "mixtral", "two workers"],
)
def generator(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[GeneratorProcess, int]]:
    kind, num_workers = request.param
    make_mixture(kind, tmp_path / "model")
    job = write_job(tmp_path, engine="vllm", tensorParallelSize=num_workers)
    process = GeneratorProcess(tmp_path, job, "--serve-initial")
    yield process, num_workers
    process.kill()


@asynccontextmanager
async def always_running(client: Client, num_tokens: int) -> AsyncIterator[list[dict[str, Any]]]:
    """Two sequences run at every moment, each followed by another, half a length apart: whenever an
    update arrives, it finds one that is under way. Yields the list that all are in at the end.
    """
    choices: list[dict[str, Any]] = []
    ended = asyncio.Event()

    async def generate(first: int) -> None:
        choices.append(await client.choice(PROMPT, first))
        while not ended.is_set():
            choices.append(await client.choice(PROMPT, num_tokens))

    tasks = [asyncio.create_task(generate(first)) for first in (num_tokens, num_tokens // 2)]
    async with running(*tasks):
        await client.choice(PROMPT, 8)
        yield choices
        ended.set()
        await asyncio.gather(*tasks)


@pytest.mark.vllm
@pytest.mark.timeout(600)
async def test_every_expert_gets_every_update(
    generator: tuple[GeneratorProcess, int], tmp_path: Path
) -> None:
    """Also while sequences run: one that is under way continues with the new experts."""
    process, num_workers = generator
    client, mixture = Client(process.url), Mixture(tmp_path / "model")
    trainer = Trainer(client, num_workers=num_workers)
    first = await client.choice(PROMPT, 64)
    assert (
        difference(
            first["token_logprobs"], mixture.logprobs(mixture.weights, first["token_ids"], tmp_path)
        )
        <= CLOSE
    )
    for seed, mode in enumerate(("staged", "inplace", "inplace", "staged")):
        weights = mixture.random(seed)
        await trainer.update(weights, mode=mode)
        # Two workers share the experts, so each receives its slices and both about one model.
        num_bytes = sum(weight.nbytes for weight in weights.values())
        assert trainer.reports[-1].num_bytes < 1.3 * num_bytes
        choice = await client.choice(PROMPT, 64)
        assert choice["weight_versions"] == [[trainer.version, 64]]
        assert (
            difference(
                choice["token_logprobs"], mixture.logprobs(weights, choice["token_ids"], tmp_path)
            )
            <= CLOSE
        ), mode
    new = mixture.random(9)
    async with always_running(client, num_tokens=800) as choices:
        await trainer.update(new, kv_cache="recompute")
    mixed = [choice for choice in choices if len(choice["weight_versions"]) == 2]
    assert mixed
    for choice in mixed:
        (_, before), (version, _) = choice["weight_versions"]
        assert version == trainer.version
        expected = mixture.logprobs(new, choice["token_ids"], tmp_path)
        assert difference(choice["token_logprobs"][before:], expected[before:]) <= CLOSE
        assert difference(choice["token_logprobs"][:before], expected[:before]) > 0.1
    trainer.leave()


def test_the_transformers_engine_refuses_a_mixture_whose_experts_it_could_not_update(
    tmp_path: Path,
) -> None:
    make_mixture("qwen3_moe", tmp_path / "model")
    job = load_job(write_job(tmp_path, engine="transformers"))
    with pytest.raises(
        SettingsError, match=r"such as model\.layers\.0\.mlp\.experts\.down_proj.*use engine vllm"
    ):
        make_engine(
            job,
            GeneratorSettings(engine="transformers"),
            tmp_path / "model",
            initial_version=0,
            takes_updates=True,
        )


async def test_an_evaluator_s_generator_serves_a_mixture_in_transformers_and_takes_no_update(
    tmp_path: Path,
) -> None:
    mixture = Mixture(make_mixture("qwen3_moe", tmp_path / "model"))
    job = write_job(tmp_path, engine="transformers")
    process = GeneratorProcess(
        tmp_path, job, "--serve-initial", "--initial-version", "40", "--name", "evaluator-generator"
    )
    try:
        client = Client(process.url)
        choice = await client.choice(PROMPT, 64)
        assert choice["weight_versions"] == [[40, 64]]
        assert (
            difference(
                choice["token_logprobs"],
                mixture.logprobs(mixture.weights, choice["token_ids"], tmp_path),
            )
            <= CLOSE
        )
        group = {
            "epoch": 1,
            "master_address": "127.0.0.1",
            "master_port": 1,
            "rank_offset": 1,
            "world_size": 2,
        }
        status, answer = await client.call(
            "POST", "/init_process_group", {**group, "backend": "gloo", "timeout_s": 5}
        )
        assert status == 409
        assert "keeps the weights that it started with" in answer["error"]["message"]
        post = {
            "epoch": 1,
            "version": 41,
            "manifest": manifest_of(mixture.weights).to_json(),
            "timeout_s": 5,
        }
        assert (await client.call("POST", "/request_weight_update", post))[0] == 409
    finally:
        process.kill()
