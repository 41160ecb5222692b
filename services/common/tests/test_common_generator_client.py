"""The generator's client against a real HTTP server: bodies, deadlines, and the error for every
failure.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from pipelinerl_common import generator_client, tracing
from pipelinerl_common.errors import MalformedMessage, Refused, TemporaryError, Unavailable
from pipelinerl_common.generator_api import (
    ChatMessage,
    CompletionRequest,
    InitGroupRequest,
    LoadResponse,
    ScoredSequence,
    ScoreRequest,
    UnknownManifest,
    UpdateRequest,
)
from pipelinerl_common.generator_client import (
    BadAnswer,
    ConnectionLost,
    GeneratorAway,
    GeneratorClient,
    GeneratorError,
    GeneratorRefused,
    GeneratorUnavailable,
    NoAnswer,
)

PATIENCE_S = 20.0
COMPLETION = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "policy",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "ab"},
            "finish_reason": "stop",
            "token_ids": [5, 9, 2],
            "token_logprobs": [-0.1, -2.3, -0.4],
            "weight_versions": [[6, 2], [7, 1]],
            "logprobs": None,
        }
    ],
    "prompt_token_ids": [4],
    "usage": {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4, "cached_tokens": 0},
}
WEIGHTS = {
    "version": 7,
    "checksum": "00ff",
    "epoch": 4,
    "num_workers": 2,
    "num_running": 96,
    "updates_total": 3,
    "update_failures_total": 1,
    "draining": False,
}
UPDATE = {
    "version": 7,
    "checksum": "00ff",
    "pause_s": 0.02,
    "transfer_s": 1.4,
    "apply_s": 0.6,
    "num_running": 96,
}
GROUP = InitGroupRequest(
    epoch=4,
    master_address="10.0.0.1",
    master_port=4711,
    rank_offset=3,
    world_size=5,
    backend="gloo",
    timeout_s=5,
)


@dataclass
class Server:
    """Answers every path with `answer` and notes what it was asked."""

    url: str = ""
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
    asked: list[tuple[str, str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def says(self, body: object, status: int = 200, **headers: str) -> None:
        async def answer(request: web.Request) -> web.StreamResponse:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return web.Response(body=content, status=status, headers=headers)

        self.answer = answer

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.asked.append((request.method, request.path, json.loads(body) if body else None))
        self.headers.append(dict(request.headers))
        assert self.answer is not None
        return await self.answer(request)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()


@pytest.fixture
def client(server: Server) -> GeneratorClient:
    return GeneratorClient(server.url + "/", "secret")


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError(request)


async def cut(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


# What is sent, and what comes back


async def test_a_completion_has_only_the_fields_that_were_set(
    server: Server, client: GeneratorClient
) -> None:
    server.says(COMPLETION)
    messages = [ChatMessage(role="user", content="hi")]
    answer = await client.complete(CompletionRequest(messages=messages, n=2, stop=None), None)
    assert server.asked == [
        (
            "POST",
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}], "n": 2},
        )
    ]
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert server.headers[0]["Content-Type"] == "application/json"
    [choice] = answer.choices
    assert (choice.token_ids, choice.token_logprobs) == ([5, 9, 2], [-0.1, -2.3, -0.4])
    assert choice.weight_versions == [(6, 2), (7, 1)]


async def test_every_other_call_has_its_path_and_its_typed_answer(
    server: Server, client: GeneratorClient
) -> None:
    server.says({"found": True})
    assert await client.cancel("r1", PATIENCE_S)
    server.says({"logprobs": [[-2.3, -0.4]], "weight_version": 0})
    sequences = [ScoredSequence(token_ids=[5, 9, 2], start=1)]
    scored = await client.score(ScoreRequest(sequences=sequences, temperature=0.7), PATIENCE_S)
    assert scored.logprobs == [[-2.3, -0.4]]
    server.says({"epoch": 4, "ranks": [3, 4]})
    assert (await client.init_process_group(GROUP)).ranks == [3, 4]
    server.says(UPDATE)
    update = UpdateRequest(epoch=4, version=7, manifest_hash="9f86", timeout_s=5)
    assert (await client.update_weights(update)).checksum == "00ff"
    server.says(WEIGHTS)
    assert (await client.weights(PATIENCE_S)).num_workers == 2
    load = dict.fromkeys(LoadResponse.model_fields, 3) | {"kv_usage": None}
    server.says(load)
    assert (await client.load(PATIENCE_S)).model_dump() == load
    server.says({"status": "ok"})
    await client.check_health(PATIENCE_S)
    scores = {"sequences": [{"token_ids": [5, 9, 2], "start": 1}], "temperature": 0.7}
    assert server.asked == [
        ("POST", "/v1/cancel", {"request_id": "r1"}),
        ("POST", "/v1/score", scores),
        ("POST", "/init_process_group", GROUP.model_dump()),
        (
            "POST",
            "/request_weight_update",
            {"epoch": 4, "version": 7, "manifest_hash": "9f86", "timeout_s": 5},
        ),
        ("GET", "/weights", None),
        ("GET", "/load", None),
        ("GET", "/health", None),
    ]


def test_an_update_has_either_the_manifest_or_its_hash() -> None:
    with pytest.raises(ValueError, match="either manifest or manifest_hash"):
        UpdateRequest(epoch=4, version=7, timeout_s=5)
    with pytest.raises(ValueError, match="either manifest or manifest_hash"):
        UpdateRequest(epoch=4, version=7, timeout_s=5, manifest={}, manifest_hash="9f86")


async def test_fields_of_a_newer_generator_are_ignored(
    server: Server, client: GeneratorClient
) -> None:
    server.says(WEIGHTS | {"invented_later": 1})
    assert (await client.weights(PATIENCE_S)).version == 7


async def test_a_call_inside_a_span_carries_its_traceparent(
    server: Server, client: GeneratorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.says(WEIGHTS)
    monkeypatch.setattr(tracing, "headers", lambda: {tracing.TRACEPARENT: "00-1-2-01"})
    await client.weights(PATIENCE_S)
    assert server.headers[0][tracing.TRACEPARENT] == "00-1-2-01"


async def test_a_session_keeps_its_connection_and_calls_without_one_close_theirs(
    server: Server, client: GeneratorClient
) -> None:
    peers: list[Any] = []

    async def note(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        peers.append(request.transport.get_extra_info("peername"))
        return web.json_response(WEIGHTS)

    server.answer = note
    for _ in range(2):
        await client.weights(PATIENCE_S)
    async with aiohttp.ClientSession() as session:
        for _ in range(2):
            await GeneratorClient(server.url, None, session).weights(PATIENCE_S)
    first, second, third, fourth = peers
    assert first != second
    assert third == fourth


# Failures


async def test_an_answer_with_a_fault_in_every_token_is_a_short_error(
    server: Server, client: GeneratorClient
) -> None:
    server.says({"logprobs": [[None] * 5000], "weight_version": 0})
    sequences = [ScoredSequence(token_ids=[5, 9, 2], start=1)]
    with pytest.raises(BadAnswer, match="not the expected answer") as raised:
        await client.score(ScoreRequest(sequences=sequences), PATIENCE_S)
    assert len(str(raised.value)) < 700


@pytest.mark.parametrize(
    ("status", "error", "ours"),
    [
        (400, GeneratorRefused, Refused),
        (401, GeneratorRefused, Refused),
        (404, GeneratorRefused, Refused),
        (409, GeneratorRefused, Refused),
        (422, GeneratorRefused, Refused),
        (429, GeneratorAway, Unavailable),
        (500, GeneratorUnavailable, Unavailable),
        (503, GeneratorAway, Unavailable),
        (504, GeneratorUnavailable, TemporaryError),
    ],
)
async def test_every_status_becomes_one_of_our_errors(
    server: Server,
    client: GeneratorClient,
    status: int,
    error: type[GeneratorError],
    ours: type[Exception],
) -> None:
    detail = {"message": "what is wrong", "type": "SomeError", "serving_version": 6}
    server.says({"error": detail}, status)
    with pytest.raises(ours, match=f"/weights: HTTP {status}: what is wrong$") as raised:
        await client.weights(PATIENCE_S)
    assert type(raised.value) is error
    assert isinstance(raised.value, GeneratorError)
    assert (raised.value.status, raised.value.kind) == (status, "SomeError")
    assert raised.value.serving_version == 6


async def test_an_unknown_manifest_is_told_by_its_kind(
    server: Server, client: GeneratorClient
) -> None:
    detail = {"message": "send it", "type": UnknownManifest.__name__, "serving_version": 6}
    server.says({"error": detail}, 409)
    with pytest.raises(GeneratorRefused) as raised:
        await client.update_weights(
            UpdateRequest(epoch=4, version=7, manifest_hash="9f86", timeout_s=5)
        )
    assert raised.value.kind == "UnknownManifest"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"<html>bad gateway</html>", "<html>bad gateway</html>"),
        (b'{"error": {"message": "as OpenAI says it"}}', "as OpenAI says it"),
        (b'{"error": "too long"}', "too long"),
        (b"", "Bad Gateway"),
        (b"x" * 5000, "x" * 500),
        (b"x" * (3 << 20), "x" * 500),
    ],
    ids=["proxy", "openai", "text", "empty", "long", "endless"],
)
async def test_an_error_that_is_not_ours_is_shown_as_it_is(
    server: Server, client: GeneratorClient, body: bytes, text: str
) -> None:
    server.says(body, 502)
    with pytest.raises(GeneratorUnavailable) as raised:
        await client.weights(PATIENCE_S)
    assert text in str(raised.value)
    assert len(str(raised.value)) < 600
    assert (raised.value.kind, raised.value.serving_version) == ("", -1)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("2", 2.0),
        ("0", 0.05),
        ("1000", 30.0),
        ("Wed, 21 Oct 2026 07:28:00 GMT", 0.5),
        ("nan", 0.5),
        ("", 0.5),
    ],
)
async def test_the_time_to_come_back_is_read_and_bounded(
    server: Server, client: GeneratorClient, header: str, seconds: float
) -> None:
    server.says({}, 503, **{"Retry-After": header})
    with pytest.raises(GeneratorAway) as raised:
        await client.weights(PATIENCE_S)
    assert raised.value.retry_after_s == seconds


async def test_no_answer_in_time_is_told_from_a_broken_and_from_a_refused_connection(
    server: Server, client: GeneratorClient
) -> None:
    server.answer = hang
    with pytest.raises(NoAnswer, match=r"/weights: no answer within 0\.1 s") as silent:
        await client.weights(0.1)
    server.answer = cut
    with pytest.raises(ConnectionLost, match="ServerDisconnectedError") as lost:
        await client.weights(PATIENCE_S)
    assert not isinstance(lost.value, NoAnswer)
    with pytest.raises(GeneratorAway, match="ClientConnectorError") as away:
        await GeneratorClient("http://127.0.0.1:1").weights(PATIENCE_S)
    assert silent.value.status == lost.value.status == away.value.status == 0
    with pytest.raises(ConnectionLost, match="InvalidUrl"):
        await GeneratorClient("nowhere").weights(PATIENCE_S)


async def test_an_answer_that_stops_half_way_ends_at_the_deadline(
    server: Server, client: GeneratorClient
) -> None:
    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"version": 7, ')
        await asyncio.Event().wait()
        raise AssertionError

    server.answer = half
    with pytest.raises(NoAnswer):
        await client.weights(0.2)


async def test_calls_about_weights_have_the_deadline_that_the_generator_is_given_and_a_grace(
    server: Server, client: GeneratorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator_client, "ANSWER_GRACE_S", 0.1)
    server.answer = hang
    with pytest.raises(NoAnswer, match=r"/init_process_group: no answer within 0\.15 s"):
        await client.init_process_group(GROUP.model_copy(update={"timeout_s": 0.05}))
    update = UpdateRequest(epoch=4, version=7, manifest_hash="9f86", timeout_s=0.05)
    with pytest.raises(NoAnswer, match=r"/request_weight_update: no answer within 0\.15 s"):
        await client.update_weights(update)


async def test_a_cancelled_call_closes_its_connection(
    server: Server, client: GeneratorClient
) -> None:
    began, left = asyncio.Event(), asyncio.Event()

    async def decode(request: web.Request) -> web.StreamResponse:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()
        raise AssertionError(request)

    server.answer = decode
    calling = asyncio.create_task(client.complete(CompletionRequest(prompt_token_ids=[4]), None))
    async with asyncio.timeout(PATIENCE_S):
        await began.wait()
        calling.cancel()
        await left.wait()
    with pytest.raises(asyncio.CancelledError):
        await calling


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b'{"version": 7}', json.dumps(WEIGHTS | {"version": "seven"}).encode()],
    ids=["empty", "list", "cut off", "fields missing", "wrong type"],
)
async def test_an_answer_that_breaks_the_contract_is_malformed(
    server: Server, client: GeneratorClient, body: bytes
) -> None:
    server.says(body)
    with pytest.raises(MalformedMessage, match="/weights: not the expected answer") as raised:
        await client.weights(PATIENCE_S)
    assert isinstance(raised.value, BadAnswer)
    assert raised.value.status == 200


async def test_an_answer_that_is_too_long_is_malformed_and_not_read_to_its_end(
    server: Server, client: GeneratorClient
) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 65536)

    server.answer = endless
    with pytest.raises(BadAnswer, match="more than 1048576 bytes"):
        async with asyncio.timeout(PATIENCE_S):
            await client.weights(PATIENCE_S)


async def test_an_answer_with_tokens_may_be_longer_than_the_others(
    server: Server, client: GeneratorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.says({"logprobs": [[-0.5] * 400_000], "weight_version": 0})
    request = ScoreRequest(sequences=[ScoredSequence(token_ids=[5, 9], start=1)])
    assert len((await client.score(request, PATIENCE_S)).logprobs[0]) == 400_000
    monkeypatch.setattr(generator_client, "MAX_SAMPLES_BYTES", 1000)
    with pytest.raises(BadAnswer, match="more than 1000 bytes"):
        await client.score(request, PATIENCE_S)


@pytest.mark.parametrize(
    ("body", "status", "is_ready"),
    [
        ({"version": 7}, 200, True),
        ({"error": {"message": "no weights", "type": "Unavailable"}}, 503, False),
        (b"not found", 404, True),
        (b"", 200, True),
    ],
    ids=["ready", "not yet", "an engine without it", "an engine that says nothing"],
)
async def test_readiness_is_whatever_is_not_denied(
    server: Server, client: GeneratorClient, body: object, status: int, is_ready: bool
) -> None:
    server.says(body, status)
    assert await client.is_ready(PATIENCE_S) is is_ready


async def test_one_that_does_not_answer_is_not_ready(
    server: Server, client: GeneratorClient
) -> None:
    server.answer = hang
    assert not await client.is_ready(0.1)
    assert not await GeneratorClient("http://127.0.0.1:1").is_ready(PATIENCE_S)
