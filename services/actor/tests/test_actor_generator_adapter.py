"""Updates that bring an adapter (LoRA): generators serve what the trainer computes, from few bytes
and the frozen weights.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from actor_generator_harness import (
    BUCKET_BYTES,
    CLOSE,
    DIFFERENT,
    ENGINES,
    PROMPT,
    UPDATES,
    Client,
    GeneratorProcess,
    Reference,
    Trainer,
    Weights,
    difference,
    manifest_of,
    running,
    send_half,
    trainer_of,
    write_job,
)
from safetensors.torch import load_file
from torch import Tensor

from pipelinerl_actor.generator.merged_weights import MergedWeights
from pipelinerl_actor.models.tiny import make_tiny_model
from pipelinerl_weights.adapter import a_name, b_name, merge

RANK, ALPHA = 4, 6.0
SCALE = ALPHA / RANK
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    make_tiny_model(folder / "model")
    return folder


@pytest.fixture(scope="module", params=ENGINES)
def generator(request: pytest.FixtureRequest, folder: Path) -> Iterator[GeneratorProcess]:
    job = write_job(folder, **request.param)
    document = yaml.safe_load(job.read_text())
    document["spec"]["model"]["adapter"] = {"rank": RANK, "alpha": ALPHA}
    job.write_text(yaml.safe_dump(document))
    process = GeneratorProcess(folder, job, "--serve-initial")
    yield process
    process.kill()


@pytest.fixture
async def trainer(generator: GeneratorProcess) -> Any:
    trainer = await trainer_of(Client(generator.url))
    yield trainer
    trainer.leave()


class Unmerged:
    """The model with adapters beside its weights, as a trainer computes it."""

    def __init__(self, folder: Path) -> None:
        self.reference = Reference(folder / "model")
        self.base = self.reference.weights
        self._linears = {
            n: m
            for n, m in self.reference.model.named_modules()
            if isinstance(m, torch.nn.Linear) and n != "lm_head"
        }

    def random(self, seed: int, ends: tuple[str, ...] = (*ATTENTION, *MLP)) -> dict[str, Tensor]:
        """A and B of the layers whose names end so."""
        generator = torch.Generator().manual_seed(seed)
        adapter: dict[str, Tensor] = {}
        for name, module in self._linears.items():
            if name.endswith(ends):
                adapter[a_name(name)] = 0.2 * torch.randn(
                    RANK, module.in_features, generator=generator
                )
                adapter[b_name(name)] = 0.2 * torch.randn(
                    module.out_features, RANK, generator=generator
                )
        return adapter

    def logprobs(self, adapter: Weights, prompt: list[int], sampled: list[int]) -> list[float]:
        """Log-probabilities of the sampled tokens, with W x and scale B A x computed apart."""

        def beside(a: Tensor, b: Tensor) -> Any:
            return lambda _, inputs, y: y + SCALE * (inputs[0] @ a.T @ b.T)

        hooks = [
            module.register_forward_hook(beside(adapter[a_name(name)], adapter[b_name(name)]))
            for name, module in self._linears.items()
            if a_name(name) in adapter
        ]
        try:
            return self.reference.logprobs(self.base, prompt, sampled)
        finally:
            for hook in hooks:
                hook.remove()

    def merged(self, adapter: Weights) -> dict[str, Tensor]:
        """Dense weights, for what can only be computed with them."""
        return {
            name: merge(weight, adapter[a_name(layer)], adapter[b_name(layer)], SCALE)
            if a_name(layer) in adapter
            else weight
            for name, weight in self.base.items()
            for layer in [name.removesuffix(".weight")]
        }


@pytest.fixture(scope="module")
def unmerged(folder: Path) -> Unmerged:
    return Unmerged(folder)


@pytest.mark.parametrize("mode", ["staged", "inplace"])
async def test_what_is_served_is_what_the_trainer_computes_unmerged(
    trainer: Trainer, unmerged: Unmerged, mode: str
) -> None:
    for seed in (1, 2):
        adapter = unmerged.random(seed)
        await trainer.update(adapter, mode=mode)
        choice = await trainer.client.choice(PROMPT, 48)
        assert choice["weight_versions"] == [[trainer.version, 48]]
        assert (
            difference(
                choice["token_logprobs"], unmerged.logprobs(adapter, PROMPT, choice["token_ids"])
            )
            < CLOSE
        )
        assert (
            difference(choice["token_logprobs"], unmerged.logprobs({}, PROMPT, choice["token_ids"]))
            > DIFFERENT
        )


async def test_an_update_is_as_large_as_the_adapter(trainer: Trainer, unmerged: Unmerged) -> None:
    adapter = unmerged.random(3)
    await trainer.update(adapter)
    num_bytes = sum(tensor.nbytes for tensor in adapter.values())
    assert manifest_of(adapter).num_bytes == num_bytes
    assert (
        trainer.reports[-1].num_bytes == num_bytes
    )  # every tensor here is a multiple of the alignment
    assert num_bytes < sum(tensor.nbytes for tensor in unmerged.base.values()) / 4


@pytest.mark.parametrize(
    "ends", [("q_proj",), ("v_proj", "up_proj"), ("gate_proj",), ("down_proj", "o_proj")]
)
@pytest.mark.parametrize("mode", ["staged", "inplace"])
async def test_other_layers_and_the_rest_of_a_fused_one_are_the_folder_s(
    trainer: Trainer, unmerged: Unmerged, ends: tuple[str, ...], mode: str
) -> None:
    """Also where the update before changed all of them."""
    await trainer.update(unmerged.random(3), mode=mode)
    adapter = unmerged.random(4, ends)
    await trainer.update(adapter, mode=mode)
    choice = await trainer.client.choice(PROMPT, 32)
    assert (
        difference(
            choice["token_logprobs"], unmerged.logprobs(adapter, PROMPT, choice["token_ids"])
        )
        < CLOSE
    )
    assert (
        difference(choice["token_logprobs"], unmerged.logprobs({}, PROMPT, choice["token_ids"]))
        > DIFFERENT
    )


@pytest.mark.parametrize(("mode", "kv_cache"), UPDATES)
async def test_in_flight_with_the_kv_cache_kept_or_recomputed(
    trainer: Trainer, unmerged: Unmerged, mode: str, kv_cache: str
) -> None:
    """A completion that one adapter began and another ended; on a busy machine a longer one
    follows.
    """
    old, new = unmerged.random(5), unmerged.random(6)
    for max_tokens in (300, 600, 900):
        await trainer.update(old)
        long = asyncio.create_task(trainer.client.choice(PROMPT, max_tokens))
        async with running(long):
            await trainer.client.choice(PROMPT, 16)
            report = await trainer.update(new, mode=mode, kv_cache=kv_cache)
            choice: dict[str, Any] = await long
        if len(choice["weight_versions"]) > 1:
            break
    assert report["num_running"] == 1
    (first, before), (second, after) = choice["weight_versions"]
    assert (first, second) == (trainer.version - 1, trainer.version)
    sampled, logprobs = choice["token_ids"], choice["token_logprobs"]
    assert before + after == len(sampled)
    assert difference(logprobs[:before], unmerged.logprobs(old, PROMPT, sampled)[:before]) < CLOSE
    kept = unmerged.reference.hybrid_logprobs(
        unmerged.merged(old), unmerged.merged(new), PROMPT, sampled, before
    )
    recomputed = unmerged.logprobs(new, PROMPT, sampled)[before:]
    assert difference(kept, recomputed) > DIFFERENT
    assert difference(logprobs[before:], kept if kv_cache == "keep" else recomputed) < CLOSE


@pytest.mark.parametrize("mode", ["staged", "inplace"])
@pytest.mark.parametrize("served", ["an adapter", "the folder's weights"])
async def test_a_failed_update_leaves_what_was_served(
    trainer: Trainer, unmerged: Unmerged, mode: str, served: str
) -> None:
    nothing = {name: torch.zeros_like(tensor) for name, tensor in unmerged.random(0).items()}
    old = unmerged.random(7) if served == "an adapter" else nothing
    await trainer.update(old)
    version, group = trainer.version, await trainer.form()
    new = unmerged.random(8)
    post = trainer.request(new, version + 1, mode=mode)

    def break_off() -> None:
        def abort() -> None:
            group.abort("the test calls it off")

        send_half(group, new, BUCKET_BYTES, version + 1, abort)

    await asyncio.to_thread(break_off)
    status, answer = await post
    assert (status, answer["error"]["serving_version"]) == (500, version)
    choice = await trainer.client.choice(PROMPT, 32)
    assert (
        difference(choice["token_logprobs"], unmerged.logprobs(old, PROMPT, choice["token_ids"]))
        < CLOSE
    )
    trainer.leave()
    await trainer.update(new, mode=mode)
    choice = await trainer.client.choice(PROMPT, 32)
    assert (
        difference(choice["token_logprobs"], unmerged.logprobs(new, PROMPT, choice["token_ids"]))
        < CLOSE
    )


async def test_a_manifest_that_is_no_adapter_s_is_refused(
    trainer: Trainer, unmerged: Unmerged
) -> None:
    right = unmerged.random(9)
    await trainer.update(right)
    layer = "model.layers.0.mlp.up_proj"
    wrong: list[tuple[dict[str, Tensor], str]] = [
        (unmerged.base, "unknown: lm_head.weight, model.embed_tokens.weight"),
        (
            {name: tensor for name, tensor in right.items() if name != b_name(layer)},
            f"missing: {b_name(layer)}",
        ),
        (
            right | {a_name(layer): torch.zeros(RANK + 1, 64)},
            f"{a_name(layer)} is [5, 64], not [4, 64]",
        ),
        (
            right | {a_name("model.layers.9.mlp.up_proj"): torch.zeros(4, 64)},
            "unknown: model.layers.9.mlp.up_proj.lora_A.weight",
        ),
        (right | {a_name("model.norm"): torch.zeros(4, 64)}, "unknown: model.norm.lora_A.weight"),
        (
            right | {a_name(layer): torch.zeros(RANK, 64, dtype=torch.int32)},
            f"{a_name(layer)} is int32",
        ),
    ]
    for weights, complaint in wrong:
        status, answer = await trainer.request(weights, trainer.version + 1)
        assert status == 422
        assert complaint in answer["error"]["message"]
        assert f"an adapter of rank {RANK}" in answer["error"]["message"]
    await trainer.update(right)


async def test_nothing_drifts_over_two_hundred_updates(
    trainer: Trainer, unmerged: Unmerged
) -> None:
    """After the first adapter again, every log-probability is the same to the last bit."""
    first = unmerged.random(10)
    await trainer.update(first)
    before = await _scores(trainer)
    adapters = [unmerged.random(seed) for seed in range(11, 15)]
    for number in range(200):
        await trainer.update(
            adapters[number % len(adapters)], mode="inplace" if number % 50 == 49 else "staged"
        )
    assert await _scores(trainer) != before
    await trainer.update(first)
    assert await _scores(trainer) == before


async def _scores(trainer: Trainer) -> list[float]:
    body = {
        "sequences": [{"token_ids": [40 + number % 50 for number in range(300)], "start": 1}],
        "temperature": 1.0,
    }
    status, answer = await trainer.client.call("POST", "/v1/score", body)
    assert status == 200, answer
    return [float(value) for value in answer["logprobs"][0]]


# Without a process


def test_layers_that_an_engine_fuses_come_along(folder: Path) -> None:
    base = load_file(folder / "model" / "model.safetensors")
    layer = "model.layers.1.self_attn"
    adapter = {
        a_name(f"{layer}.k_proj"): torch.ones(1, 64),
        b_name(f"{layer}.k_proj"): torch.ones(32, 1),
    }
    found = dict(
        MergedWeights(folder / "model", 0.5, {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}).of(
            adapter
        )
    )
    assert list(found) == [f"{layer}.{part}.weight" for part in ("q_proj", "k_proj", "v_proj")]
    assert torch.equal(found[f"{layer}.q_proj.weight"], base[f"{layer}.q_proj.weight"])
    assert torch.equal(found[f"{layer}.k_proj.weight"], base[f"{layer}.k_proj.weight"] + 0.5)
    assert list(dict(MergedWeights(folder / "model", 0.5).of(adapter))) == [
        f"{layer}.k_proj.weight"
    ]


def test_weights_take_the_adapter_s_type_and_the_file_stays_as_it_is(folder: Path) -> None:
    layer = "model.layers.0.mlp.down_proj"
    before = (folder / "model" / "model.safetensors").read_bytes()
    adapter = {
        a_name(layer): torch.ones(1, 128).bfloat16(),
        b_name(layer): torch.ones(64, 1).bfloat16(),
    }
    found = dict(MergedWeights(folder / "model", 1.0).of(adapter))[f"{layer}.weight"]
    base = load_file(folder / "model" / "model.safetensors")[f"{layer}.weight"]
    assert torch.equal(found, (base.bfloat16().float() + 1).bfloat16())
    found.zero_()
    assert (folder / "model" / "model.safetensors").read_bytes() == before
