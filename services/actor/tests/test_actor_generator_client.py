"""The generator's answers and statuses, as the rollout loop understands them."""

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from actor_fakes import Answer, FakeGenerator, answer_of, choice, completion
from aiohttp import web

from pipelinerl_actor.rollout.failures import GivenUp
from pipelinerl_actor.rollout.generator_client import RolloutClient, TurnRequest
from pipelinerl_actor.task import Turn
from pipelinerl_common.errors import SettingsError, TemporaryError
from pipelinerl_common.generator_client import BadAnswer, ConnectionLost, GeneratorAway
from pipelinerl_common.settings import SamplingSettings
from pipelinerl_common.types import FinishReason, VersionRun

REQUEST = TurnRequest(
    SamplingSettings(max_tokens=8, stop=["."]), messages=[{"role": "user", "content": "hi"}], n=2
)


@pytest.fixture
async def generator() -> AsyncIterator[FakeGenerator]:
    async with FakeGenerator().serving() as generator:
        yield generator


@pytest.fixture
async def client(generator: FakeGenerator) -> AsyncIterator[RolloutClient]:
    async with aiohttp.ClientSession() as session:
        yield RolloutClient(generator.url + "/", session, "secret")


async def test_a_request_has_only_the_contracts_fields(
    generator: FakeGenerator, client: RolloutClient
) -> None:
    await client.complete(REQUEST)
    await client.complete(TurnRequest(SamplingSettings(max_tokens=3), prompt_token_ids=[7, 8]))
    common = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    messages = [{"role": "user", "content": "hi"}]
    assert generator.requests[0] == {
        **common,
        "messages": messages,
        "n": 2,
        "max_tokens": 8,
        "stop": ["."],
    }
    assert generator.requests[1] == {**common, "prompt_token_ids": [7, 8], "n": 1, "max_tokens": 3}
    assert generator.headers[0]["Authorization"] == "Bearer secret"


def says(body: bytes) -> Answer:
    async def answer(request: dict[str, Any]) -> web.StreamResponse:
        return web.Response(body=body)

    return answer


async def test_choices_become_turns_in_the_order_of_their_indices(
    generator: FakeGenerator, client: RolloutClient
) -> None:
    mixed = choice(0, "ab", finish_reason="length", weight_versions=[[3, 1], [4, 0], [5, 2]])
    generator.script.append(says(json.dumps(answer_of([choice(1, "c"), mixed], [4, 5])).encode()))
    completions = await client.complete(REQUEST)
    assert completions.prompt_token_ids == (4, 5)
    runs = (VersionRun(3, 1), VersionRun(5, 2))
    assert completions.turns[0] == Turn(
        "ab", (97, 98, 2), (-0.5, -0.5, -0.5), runs, FinishReason.LENGTH
    )
    assert completions.turns[1].text == "c"


@pytest.mark.parametrize(
    "changes",
    [
        {"token_logprobs": [-0.5]},
        {"weight_versions": [[0, 1]]},
        {"weight_versions": [[-1, 2]]},
        {"token_logprobs": [-0.5, float("nan")]},
        {"finish_reason": "abort"},
        {"token_ids": None},
        {"message": None},
    ],
)
async def test_a_choice_that_breaks_the_contract_is_given_up(
    generator: FakeGenerator, client: RolloutClient, changes: dict[str, Any]
) -> None:
    choices = [choice(0, "7") | changes, choice(1, "7")]
    generator.script.append(says(json.dumps(answer_of(choices, [4])).encode()))
    with pytest.raises(GivenUp) as raised:
        await client.complete(REQUEST)
    assert raised.value.reason == "bad_response"


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"choices": []}', json.dumps(completion(["7"], prompt=[4])).encode()]
)
async def test_an_answer_without_all_choices_is_given_up(
    generator: FakeGenerator, client: RolloutClient, body: bytes
) -> None:
    generator.script.append(says(body))
    with pytest.raises(GivenUp) as raised:
        await client.complete(REQUEST)
    assert raised.value.reason == "bad_response"


async def test_a_request_that_the_generator_would_refuse_is_given_up_as_if_it_had(
    generator: FakeGenerator, client: RolloutClient
) -> None:
    with pytest.raises(GivenUp) as raised:
        await client.complete(TurnRequest(SamplingSettings(), messages=[]))
    assert (raised.value.reason, generator.requests) == ("http_422", [])


@pytest.mark.parametrize(
    ("status", "error", "reason"),
    [
        (400, GivenUp, "http_400"),
        (404, GivenUp, "http_404"),
        (413, GivenUp, "http_413"),
        (422, GivenUp, "http_422"),
        (401, SettingsError, None),
        (403, SettingsError, None),
        (429, GeneratorAway, None),
        (503, GeneratorAway, None),
        (500, TemporaryError, None),
        (504, TemporaryError, None),
    ],
)
async def test_statuses_are_sorted(
    generator: FakeGenerator,
    client: RolloutClient,
    status: int,
    error: type[Exception],
    reason: str | None,
) -> None:
    generator.script.append(generator.status(status, "what is wrong"))
    with pytest.raises(error, match=f"HTTP {status}: what is wrong") as raised:
        await client.complete(REQUEST)
    assert getattr(raised.value, "reason", None) == reason


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("2", 2.0), ("0", 0.05), ("1000", 30.0), ("Wed, 21 Oct 2026 07:28:00 GMT", 0.5), ("nan", 0.5)],
)
async def test_a_generator_says_when_to_come_back(
    generator: FakeGenerator, client: RolloutClient, header: str, seconds: float
) -> None:
    generator.script.append(generator.status(503, Retry_After=header))
    with pytest.raises(GeneratorAway) as raised:
        await client.complete(REQUEST)
    assert raised.value.retry_after_s == seconds


async def test_a_connection_that_breaks_is_told_from_one_that_is_refused(
    generator: FakeGenerator, client: RolloutClient
) -> None:
    generator.script.append(generator.reset)
    with pytest.raises(ConnectionLost):
        await client.complete(REQUEST)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(GeneratorAway):
            await RolloutClient("http://127.0.0.1:1", session, None).complete(REQUEST)


async def test_a_load_of_impossible_numbers_is_no_load(
    generator: FakeGenerator, client: RolloutClient
) -> None:
    assert (await client.load(5.0)).kv_tokens == 64
    generator.kv_tokens = -1
    with pytest.raises(BadAnswer, match="/load: not a load"):
        await client.load(5.0)
