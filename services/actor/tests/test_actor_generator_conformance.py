"""What every engine must do, tried through HTTP on a real generator process with a real trainer at
the other end of the group.

Things are triggered by tokens, never by time: a short request that ends shows that the longer ones
beside it are under way.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from actor_generator_harness import (
    CALL_S,
    CLOSE,
    DIFFERENT,
    ENGINES,
    MAX_MODEL_LEN,
    PROMPT,
    UPDATES,
    Client,
    GeneratorProcess,
    Reference,
    Trainer,
    Weights,
    difference,
    manifest_of,
    prompt_end,
    running,
    send_half,
    trainer_of,
    until,
    write_job,
)
from prometheus_client.parser import text_string_to_metric_families

from pipelinerl_actor.models.tiny import CHARACTERS, SPECIAL_TOKENS, make_tiny_model
from pipelinerl_weights.group import Rendezvous

X, Y = 50, 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generator")
    make_tiny_model(folder / "model")
    return folder


@pytest.fixture(scope="module", params=ENGINES)
def generator(request: pytest.FixtureRequest, folder: Path) -> Iterator[GeneratorProcess]:
    process = GeneratorProcess(folder, write_job(folder, **request.param), "--serve-initial")
    yield process
    process.kill()


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder / "model")


@pytest.fixture(scope="module")
def initial(folder: Path) -> dict[str, torch.Tensor]:
    return Reference(folder / "model").weights


@pytest.fixture
def client(generator: GeneratorProcess) -> Client:
    return Client(generator.url)


@pytest.fixture
async def trainer(client: Client) -> Any:
    trainer = await trainer_of(client)
    yield trainer
    trainer.leave()


def close(left: list[float], right: list[float], tolerance: float = CLOSE) -> bool:
    return difference(left, right) <= tolerance


# Sampling


async def test_ids_logprobs_and_versions_of_every_choice(
    client: Client, trainer: Trainer, reference: Reference, initial: dict[str, torch.Tensor]
) -> None:
    await trainer.update(initial)
    answer = await client.complete(PROMPT, 12, n=3, temperature=0.7, logprobs=True)
    assert answer["prompt_token_ids"] == PROMPT
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    assert answer["usage"]["completion_tokens"] == 36
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 3
    for index, choice in enumerate(answer["choices"]):
        assert choice["index"] == index
        assert choice["finish_reason"] == "length"
        assert choice["weight_versions"] == [[trainer.version, 12]]
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == choice[
            "token_logprobs"
        ]
        expected = reference.logprobs(initial, PROMPT, choice["token_ids"], temperature=0.7)
        assert close(choice["token_logprobs"], expected)


async def test_logprobs_are_those_of_the_truncated_distribution(
    client: Client, trainer: Trainer, initial: dict[str, torch.Tensor]
) -> None:
    await trainer.update(initial)
    one = await client.choice(PROMPT, 8, top_k=1)
    assert close(one["token_logprobs"], [0.0] * 8)
    assert (await client.choice(PROMPT, 8, temperature=0))["token_ids"] == one["token_ids"]
    two = await client.choice(PROMPT, 64, top_k=2)
    assert min(two["token_logprobs"]) < -0.5
    nucleus = await client.choice(PROMPT, 32, top_p=0.02)
    full = await client.choice(PROMPT, 32)
    assert sum(nucleus["token_logprobs"]) > sum(full["token_logprobs"]) / 2


async def test_the_seed_decides(
    client: Client, trainer: Trainer, initial: dict[str, torch.Tensor]
) -> None:
    await trainer.update(initial)
    first = await client.complete(PROMPT, 16, n=2, seed=7)
    again = await client.complete(PROMPT, 16, n=2, seed=7)
    other = await client.choice(PROMPT, 16, seed=8)
    ids = [choice["token_ids"] for choice in first["choices"]]
    assert ids == [choice["token_ids"] for choice in again["choices"]]
    assert ids[0] != ids[1]
    assert other["token_ids"] == ids[1]


async def test_long_seeded_prompts_may_come_all_at_once(
    client: Client, trainer: Trainer, initial: dict[str, torch.Tensor]
) -> None:
    await trainer.update(initial)
    prompts = [[20 + first, *[40 + position % 40 for position in range(899)]] for first in range(6)]
    at_once = await asyncio.gather(*(client.choice(prompt, 4, seed=7) for prompt in prompts))
    alone = [await client.choice(prompt, 4, seed=7) for prompt in prompts]
    assert [choice["token_ids"] for choice in at_once] == [choice["token_ids"] for choice in alone]


async def test_stop_strings_and_the_end_token_end_a_completion(
    client: Client, trainer: Trainer, reference: Reference, initial: dict[str, torch.Tensor]
) -> None:
    a, end = len(SPECIAL_TOKENS) + CHARACTERS.index("a"), SPECIAL_TOKENS.index("<|end|>")
    await trainer.update(reference.constant(a))
    choice = await client.choice(PROMPT, 20, stop=["aaa"])
    assert (choice["finish_reason"], choice["message"]["content"], choice["token_ids"]) == (
        "stop",
        "aaa",
        [a, a, a],
    )
    assert choice["weight_versions"] == [[trainer.version, 3]]
    assert len(choice["token_logprobs"]) == 3
    await trainer.update(reference.constant(end))
    choice = await client.choice(PROMPT, 20, ignore_eos=False)
    assert (choice["finish_reason"], choice["message"]["content"], choice["token_ids"]) == (
        "stop",
        "",
        [end],
    )


async def test_messages_become_the_models_chat_prompt(client: Client) -> None:
    body = {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 1}
    status, answer = await client.call("POST", "/v1/chat/completions", body)
    assert status == 200
    user, end, assistant = (
        SPECIAL_TOKENS.index(token) for token in ("<|user|>", "<|end|>", "<|assistant|>")
    )
    text = [len(SPECIAL_TOKENS) + CHARACTERS.index(character) for character in "1+1="]
    assert answer["prompt_token_ids"] == [user, *text, end, assistant]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_scores_are_the_logprobs_at_the_temperature(
    client: Client, trainer: Trainer, reference: Reference, temperature: float
) -> None:
    weights = reference.random(seed=3)
    await trainer.update(weights)
    full = [40 + index % 50 for index in range(MAX_MODEL_LEN)]
    sequences = [{"token_ids": PROMPT, "start": 1}, {"token_ids": full, "start": MAX_MODEL_LEN - 5}]
    status, answer = await client.call(
        "POST", "/v1/score", {"sequences": sequences, "temperature": temperature}
    )
    assert status == 200, answer
    assert answer["weight_version"] == trainer.version
    short, long = answer["logprobs"]
    assert close(short, reference.logprobs(weights, PROMPT[:1], PROMPT[1:], temperature))
    assert close(long, reference.logprobs(weights, full[:-5], full[-5:], temperature))


# What is turned away


@pytest.mark.parametrize(
    ("body", "status", "complaint"),
    [
        ({"max_tokens": 4}, 422, "either messages or prompt_token_ids"),
        ({"prompt_token_ids": [], "max_tokens": 4}, 422, "prompt_token_ids"),
        ({"prompt_token_ids": [40], "max_tokens": 0}, 422, "max_tokens"),
        ({"prompt_token_ids": [40], "max_tokns": 4}, 422, "max_tokns"),
        ({"prompt_token_ids": [40], "temperature": -1}, 422, "temperature"),
        ({"prompt_token_ids": [40], "stop": [""]}, 422, "empty string"),
        (
            {"prompt_token_ids": [40, 99999], "max_tokens": 4},
            400,
            "token id 99999 is outside the vocabulary of 128",
        ),
        (
            {"prompt_token_ids": [40] * 1000, "max_tokens": 25},
            400,
            "1000 tokens and max_tokens=25 exceed the context of 1024",
        ),
        ({"prompt_token_ids": [40] * 2000}, 400, "prompt of 2000 tokens"),
    ],
)
async def test_a_request_that_cannot_be_served_says_why(
    client: Client, body: Any, status: int, complaint: str
) -> None:
    got, answer = await client.call("POST", "/v1/chat/completions", body)
    assert got == status
    assert complaint in answer["error"]["message"]


async def test_the_longest_request_fits(client: Client) -> None:
    choice = await client.choice([40] * (MAX_MODEL_LEN - 3), 3)
    assert len(choice["token_ids"]) == 3


async def test_the_token_is_needed_where_it_matters(client: Client) -> None:
    for token in (None, "wrong"):
        stranger = Client(client.url, token)
        for path in (
            "/v1/chat/completions",
            "/v1/score",
            "/init_process_group",
            "/request_weight_update",
            "/drain",
        ):
            status, answer = await stranger.call("POST", path, {})
            assert (path, status) == (path, 401)
            assert "token" in answer["error"]["message"]
        for path in ("/health", "/ready", "/weights", "/metrics"):
            assert (await stranger.call("GET", path))[0] == 200


async def test_a_client_that_leaves_frees_its_place(client: Client) -> None:
    """8 sequences fill the engine; a ninth runs to its end only because theirs stop."""
    body = {"prompt_token_ids": PROMPT, "max_tokens": 1000, "ignore_eos": True, "n": 8}
    leaving = asyncio.create_task(client.call("POST", "/v1/chat/completions", body))
    async with running(leaving):

        async def full() -> bool:
            return bool((await client.weights())["num_running"] == 8)

        await until(full)

    async def empty() -> bool:
        return bool((await client.weights())["num_running"] == 0)

    await until(empty)
    await client.choice(PROMPT, 4)
    metrics = (await client.call("GET", "/metrics"))[1]
    cancelled = float(
        next(
            line for line in metrics.splitlines() if "cancelled_total" in line and line[0] != "#"
        ).split()[1]
    )
    assert cancelled >= 8


async def test_a_cancelled_request_answers_with_what_was_sampled_and_can_go_on(
    client: Client, trainer: Trainer, reference: Reference
) -> None:
    """Weights change on the way, so that the answer has tokens of two versions before it is
    stopped; the rest comes after.
    """
    before = trainer.version
    long = asyncio.create_task(client.complete(PROMPT, 1000, n=2, request_id="long"))
    async with running(long):
        await client.choice(PROMPT, 4)
        weights = reference.random(seed=9)
        await trainer.update(weights)
        await client.choice(PROMPT, 4)
        assert (await client.call("POST", "/v1/cancel", {"request_id": "another"}))[1] == {
            "found": False
        }
        assert (await client.call("POST", "/v1/cancel", {"request_id": "long"}))[1] == {
            "found": True
        }
        answer = await long
    for choice in answer["choices"]:
        sampled = len(choice["token_ids"])
        assert choice["finish_reason"] == "abort"
        assert 4 < sampled < 1000
        assert len(choice["token_logprobs"]) == sampled
        assert [version for version, _ in choice["weight_versions"]] == [before, trainer.version]
        assert sum(number for _, number in choice["weight_versions"]) == sampled
        assert max(choice["token_logprobs"]) <= 0
    kept = answer["choices"][0]["token_ids"]
    rest = await client.complete(PROMPT, 5, answer_token_ids=kept)
    choice = rest["choices"][0]
    assert rest["prompt_token_ids"] == PROMPT
    assert len(choice["token_ids"]) == 5
    assert len(choice["message"]["content"]) >= len(answer["choices"][0]["message"]["content"])
    assert close(
        choice["token_logprobs"], reference.logprobs(weights, [*PROMPT, *kept], choice["token_ids"])
    )

    async def empty() -> bool:
        return bool((await client.weights())["num_running"] == 0)

    await until(empty)


async def test_a_request_that_has_sampled_nothing_is_stopped_too(client: Client) -> None:
    """8 sequences fill the engine, so the ninth waits."""
    filling = asyncio.create_task(client.complete(PROMPT, 1000, n=8, request_id="filling"))
    async with running(filling):
        waiting = asyncio.create_task(client.complete(PROMPT, 1000, request_id="waiting"))
        while not (await client.call("POST", "/v1/cancel", {"request_id": "waiting"}))[1]["found"]:
            assert not waiting.done()
        answer = await waiting
        assert answer["choices"][0]["finish_reason"] == "abort"
        await client.call("POST", "/v1/cancel", {"request_id": "filling"})
        assert {choice["finish_reason"] for choice in (await filling)["choices"]} == {"abort"}


# Updates


@pytest.mark.parametrize(("mode", "kv_cache"), UPDATES)
async def test_versions_are_exact_to_the_token_for_everything_that_runs(
    client: Client, trainer: Trainer, reference: Reference, mode: str, kv_cache: str
) -> None:
    """Random weights, then ones that sample only X, then only Y: the tokens show which weights
    sampled them.
    """
    base = trainer.version + 1
    await trainer.update(reference.random(seed=1), mode=mode, kv_cache=kv_cache)
    long = [
        asyncio.create_task(client.choice([40 + i, *PROMPT], 600, temperature=1.0))
        for i in range(7)
    ]
    async with running(*long):
        for token in (X, Y):
            await client.choice(PROMPT, 24)
            report = await trainer.update(reference.constant(token), mode=mode, kv_cache=kv_cache)
            assert report["num_running"] == 7
            assert report["pause_s"] > 0
        choices = await asyncio.gather(*long)
    at_random: set[int] = set()
    for choice in choices:
        versions, lengths = zip(*choice["weight_versions"], strict=True)
        assert versions == (base, base + 1, base + 2)
        assert sum(lengths) == len(choice["token_ids"]) == len(choice["token_logprobs"]) == 600
        at_random.update(choice["token_ids"][: lengths[0]])
        assert set(choice["token_ids"][lengths[0] : lengths[0] + lengths[1]]) == {X}
        assert set(choice["token_ids"][lengths[0] + lengths[1] :]) == {Y}
    assert len(at_random) > 5


async def updated_midway(
    client: Client, trainer: Trainer, old: Weights, new: Weights, *, mode: str, kv_cache: str
) -> dict[str, Any]:
    """A completion that `old` began and `new` ended. On a busy machine it may end before the
    update: a longer one follows.
    """
    for max_tokens in (300, 600, 900):
        await trainer.update(old)
        long = asyncio.create_task(client.choice(PROMPT, max_tokens))
        async with running(long):
            await client.choice(PROMPT, 16)
            await trainer.update(new, mode=mode, kv_cache=kv_cache)
            choice: dict[str, Any] = await long
        if len(choice["weight_versions"]) > 1:
            return choice
    raise AssertionError("every completion ended before its update")


@pytest.mark.parametrize(("mode", "kv_cache"), UPDATES)
async def test_the_kv_cache_is_kept_or_recomputed_as_asked(
    client: Client, trainer: Trainer, reference: Reference, mode: str, kv_cache: str
) -> None:
    old, new = reference.random(seed=4), reference.random(seed=5)
    choice = await updated_midway(client, trainer, old, new, mode=mode, kv_cache=kv_cache)
    (_, before), (_, after) = choice["weight_versions"]
    assert before >= 1
    assert before + after == len(choice["token_ids"])
    sampled, logprobs = choice["token_ids"], choice["token_logprobs"]
    assert close(logprobs[:before], reference.logprobs(old, PROMPT, sampled)[:before])
    kept = reference.hybrid_logprobs(old, new, PROMPT, sampled, before)
    recomputed = reference.logprobs(new, PROMPT, sampled)[before:]
    assert not close(kept, recomputed, DIFFERENT)
    assert close(logprobs[before:], kept if kv_cache == "keep" else recomputed)


@pytest.mark.parametrize("mode", ["staged", "inplace"])
async def test_updates_with_nothing_running_and_twice_in_a_row(
    client: Client, trainer: Trainer, reference: Reference, mode: str
) -> None:
    for token in (X, Y):
        report = await trainer.update(reference.constant(token), mode=mode)
        assert report["num_running"] == 0
    choice = await client.choice(PROMPT, 5)
    assert choice["token_ids"] == [Y] * 5
    assert choice["weight_versions"] == [[trainer.version, 5]]


async def test_older_versions_are_refused_unless_asked_for_and_equal_ones_verified_again(
    client: Client, trainer: Trainer, reference: Reference
) -> None:
    await trainer.update(reference.constant(X))
    version = trainer.version
    await trainer.update(reference.constant(X), version=version)
    status, answer = await trainer.request(reference.constant(Y), version - 1)
    assert status == 409
    assert answer["error"]["serving_version"] == version
    assert str(version - 1) in answer["error"]["message"]
    await trainer.update(reference.constant(Y), version=version - 1, allow_rollback=True)
    assert (await client.choice(PROMPT, 2))["weight_versions"] == [[version - 1, 2]]
    await trainer.update(reference.constant(X), version=version)


async def test_a_wrong_manifest_is_refused_before_anything_changes(
    client: Client, trainer: Trainer, reference: Reference
) -> None:
    await trainer.update(reference.constant(X))
    version, right = trainer.version, reference.constant(Y)
    wrong: dict[str, tuple[dict[str, torch.Tensor], str]] = {
        "a tensor less": (
            {name: t for name, t in right.items() if "norm" not in name},
            "missing: model.layers.0",
        ),
        "a tensor more": (right | {"model.extra": torch.zeros(3)}, "unknown: model.extra"),
        "another shape": (
            right | {"model.norm.weight": torch.zeros(3)},
            "model.norm.weight is [3], not [64]",
        ),
        "another type": (
            right | {"model.norm.weight": torch.zeros(64, dtype=torch.int32)},
            "model.norm.weight is int32",
        ),
    }
    for weights, complaint in wrong.values():
        status, answer = await trainer.request(weights, version + 1)
        assert status == 422
        assert complaint in answer["error"]["message"]
        assert answer["error"]["serving_version"] == version
    status, _ = await trainer.request(right, version + 1, mode="sideways")
    assert status == 422
    # The group is still good: no member entered a collective.
    await trainer.update(right)
    assert (await client.choice(PROMPT, 2))["token_ids"] == [Y, Y]


async def test_a_manifest_is_named_by_its_hash_until_the_next_group(
    client: Client, trainer: Trainer, reference: Reference
) -> None:
    weights = reference.constant(X)
    named: dict[str, Any] = {
        "manifest": None,
        "manifest_hash": manifest_of(weights, trainer.bucket_bytes).hash,
    }
    await trainer.update(weights)
    await trainer.update(reference.constant(Y), **named)
    await trainer.update(reference.constant(X), mode="inplace", **named)
    assert (await client.choice(PROMPT, 2))["token_ids"] == [X, X]
    await trainer.form()
    status, answer = await trainer.request(reference.constant(Y), trainer.version + 1, **named)
    assert (status, answer["error"]["type"]) == (409, "UnknownManifest")
    await trainer.update(reference.constant(Y))
    await trainer.update(reference.constant(X), **named)
    assert (await client.choice(PROMPT, 2))["token_ids"] == [X, X]


async def test_a_wrong_epoch_is_refused(
    client: Client, trainer: Trainer, reference: Reference
) -> None:
    await trainer.update(reference.constant(X))
    epoch = trainer.epoch
    trainer.epoch += 1
    status, answer = await trainer.request(reference.constant(Y), trainer.version + 1)
    trainer.epoch = epoch
    assert status == 409
    assert f"member in epoch {epoch}" in answer["error"]["message"]
    body = {
        "epoch": epoch,
        "master_address": "127.0.0.1",
        "master_port": 1,
        "rank_offset": 1,
        "world_size": 2,
        "backend": "gloo",
        "timeout_s": 1,
    }
    assert (await client.call("POST", "/init_process_group", body))[0] == 409


# Faults


@pytest.mark.parametrize("mode", ["staged", "inplace"])
@pytest.mark.parametrize(
    "fault", ["silence", "abort before", "abort half-way", "sender dies half-way"]
)
async def test_a_failed_update_leaves_the_old_weights_serving_whole(
    client: Client, trainer: Trainer, reference: Reference, mode: str, fault: str
) -> None:
    old, new = reference.random(seed=6), reference.constant(Y)
    await trainer.update(old)
    version, group = trainer.version, await trainer.form()
    long = asyncio.create_task(client.choice(PROMPT, 400))
    async with running(long):
        await client.choice(PROMPT, 8)
        with prompt_end():
            post = trainer.request(
                new, version + 1, mode=mode, timeout_s=1.5 if fault == "silence" else CALL_S
            )
            await asyncio.to_thread(_fail, trainer, group, new, version + 1, fault)
            status, answer = await post
        assert status == (504 if fault == "silence" else 500), answer
        assert answer["error"]["serving_version"] == version
        weights = await client.weights()
        assert (weights["version"], weights["epoch"]) == (version, 0)
        choice = await long
    assert choice["weight_versions"] == [[version, 400]]
    assert close(choice["token_logprobs"], reference.logprobs(old, PROMPT, choice["token_ids"]))
    after = await client.choice(PROMPT, 16)
    assert close(after["token_logprobs"], reference.logprobs(old, PROMPT, after["token_ids"]))
    trainer.leave()
    await trainer.update(new, mode=mode)
    assert (await client.choice(PROMPT, 2))["token_ids"] == [Y, Y]


def _fail(
    trainer: Trainer, group: Any, weights: dict[str, torch.Tensor], version: int, fault: str
) -> None:
    """What goes wrong on the sender's side."""
    if fault == "silence":
        return

    def end() -> None:
        if "abort" in fault:
            group.abort("the test calls it off")
        else:
            trainer.leave()

    if "half-way" in fault:
        send_half(group, weights, trainer.bucket_bytes, version, end)
    else:
        group.wait_all_receiving(version, CALL_S)
        end()


async def test_a_group_that_does_not_form_ends_at_the_deadline(
    client: Client, trainer: Trainer
) -> None:
    rendezvous = Rendezvous.open("127.0.0.1", 0, 3)
    body = {
        "epoch": (await client.weights())["epoch"] + 1,
        "master_address": "127.0.0.1",
        "master_port": rendezvous.port,
        "rank_offset": 1,
        "world_size": 3,
        "backend": "gloo",
        "timeout_s": 1.0,
    }
    with prompt_end():
        status, answer = await client.call("POST", "/init_process_group", body)
    assert status == 504
    assert "did not join" in answer["error"]["message"]
    rendezvous.close()
    assert (await client.weights())["epoch"] == 0
    await trainer.form()


async def test_a_new_group_ends_an_update_that_waits_in_the_old_one(
    client: Client, trainer: Trainer, reference: Reference
) -> None:
    await trainer.update(reference.constant(X))
    post = trainer.request(reference.constant(Y), trainer.version + 1)
    assert trainer.group is not None
    await asyncio.to_thread(trainer.group.wait_all_receiving, trainer.version + 1, CALL_S)
    with prompt_end():
        await trainer.form()
        assert (await post)[0] == 500
    await trainer.update(reference.constant(Y))
    assert (await client.choice(PROMPT, 2))["token_ids"] == [Y, Y]


async def test_a_second_update_at_the_same_time_is_refused(
    client: Client, trainer: Trainer, reference: Reference
) -> None:
    group = await trainer.form()
    weights = reference.constant(X)
    first = trainer.request(weights, trainer.version + 1)
    await asyncio.to_thread(group.wait_all_receiving, trainer.version + 1, CALL_S)
    status, answer = await trainer.request(weights, trainer.version + 2)
    assert status == 409
    assert "an update is running" in answer["error"]["message"]
    group.abort("enough")
    assert (await first)[0] == 500


# The prefix cache


async def test_cached_prefixes_never_mix_versions(
    client: Client, trainer: Trainer, reference: Reference, generator: GeneratorProcess
) -> None:
    """The same long prompt before and after an update, and one that waits in the engine while the
    update happens.
    """
    old, new = reference.random(seed=8), reference.random(seed=9)
    prompt = [40 + index % 50 for index in range(600)]
    await trainer.update(old)
    await client.choice(prompt, 4)
    cached = await client.complete(prompt, 4)
    if any("engine=vllm" in line for line in generator.log):
        assert cached["usage"]["cached_tokens"] >= 256
    full = asyncio.create_task(client.complete(PROMPT, 400, n=8))
    waiting = asyncio.create_task(client.choice(prompt, 4))
    async with running(full, waiting):

        async def both() -> bool:
            return bool((await client.weights())["num_running"] == 9)

        await until(both)
        await trainer.update(new, kv_cache="keep")
        late = await waiting
        await full
    fresh = await client.choice(prompt, 4)
    for choice in (late, fresh):
        assert choice["weight_versions"] == [[trainer.version, 4]]
        assert close(choice["token_logprobs"], reference.logprobs(new, prompt, choice["token_ids"]))


async def test_metrics_tell_what_happened(
    client: Client, trainer: Trainer, reference: Reference, generator: GeneratorProcess
) -> None:
    await trainer.update(reference.constant(X))
    await client.choice(PROMPT, 4)
    _, text = await client.call("GET", "/metrics")
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("mode", "staged") == "staged"
    }
    assert values["pipelinerl_weight_version"] == trainer.version
    assert values["pipelinerl_sampled_tokens_total"] > 0
    assert values["pipelinerl_sequences_running"] == 0
    assert values["pipelinerl_sequences_limit"] == 8
    assert values["pipelinerl_weight_updates_applied_total"] >= 1
    assert values["pipelinerl_weight_pause_seconds_count"] >= 1
    is_vllm = any("engine=vllm" in line for line in generator.log)
    assert values.get("vllm:generation_tokens_total", 0.0) > 0 or not is_vllm
    assert ("vllm:kv_cache_usage_perc" in values) == is_vllm


async def test_the_load_tells_what_runs_and_what_steps_cost(client: Client) -> None:
    _, before = await client.call("GET", "/load")
    long = asyncio.create_task(client.complete(PROMPT, 1000, n=4))
    async with running(long):
        loads: list[dict[str, Any]] = []

        async def decoding() -> bool:
            loads.append((await client.call("GET", "/load"))[1])
            return bool(loads[-1]["num_running"] == 4)

        await until(decoding)
        full = loads[-1]
    _, text = await client.call("GET", "/metrics")
    values = {
        line.partition("{")[0].removeprefix("pipelinerl_"): float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if not line.startswith("#")
    }

    async def empty() -> bool:
        loads.append((await client.call("GET", "/load"))[1])
        return bool(loads[-1]["num_running"] == 0)

    await client.complete(PROMPT, 8)
    await until(empty)
    after = loads[-1]
    assert after["steps_total"] > before["steps_total"]
    assert (
        after["step_tokens_total"] - before["step_tokens_total"]
        >= after["steps_total"] - before["steps_total"]
    )
    assert after["step_seconds_total"] > before["step_seconds_total"]
    assert after["running_seconds_total"] > before["running_seconds_total"]
    assert (full["num_waiting"], full["preemptions_total"]) == (0, before["preemptions_total"])
    assert values["decode_steps_total"] >= before["steps_total"]
    if full["kv_tokens"] is None:  # an engine without blocks
        assert "kv_cache_usage_ratio" not in values
    else:
        assert 0 < full["kv_usage"] < 1
        assert full["kv_tokens"] % 16 == 0
        assert after["kv_usage"] == 0
        assert after["kv_usage_seconds_total"] > before["kv_usage_seconds_total"]
        assert 0 <= values["kv_cache_usage_ratio"] < 1  # they may have ended by then


async def test_a_stop_lets_what_runs_end(client: Client, generator: GeneratorProcess) -> None:
    """The last test: the process ends with it."""
    long = asyncio.create_task(client.choice(PROMPT, 300))
    async with running(long):
        await client.choice(PROMPT, 4)
        generator.process.terminate()
        assert len((await long)["token_ids"]) == 300
    assert await asyncio.to_thread(generator.process.wait, 60) == 0
