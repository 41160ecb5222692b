"""The routes around an engine: readiness, limits, draining, and what a fatal error does."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from actor_generator_fakes import FakeEngine
from actor_generator_harness import Client, until

from pipelinerl_actor.generator.app import RunningGenerator, create_app
from pipelinerl_actor.generator.metrics import GeneratorMetrics
from pipelinerl_actor.generator.request_handler import RequestHandler, RequestLimits
from pipelinerl_actor.generator.service import serve_http
from pipelinerl_actor.generator.updater import WeightUpdater
from pipelinerl_actor.generator.weight_layout import WeightLayout
from pipelinerl_common.errors import FatalError, Unavailable
from pipelinerl_common.generator_api import InitGroupRequest, UpdateRequest
from pipelinerl_common.generator_client import GeneratorClient, GeneratorRefused
from pipelinerl_weights.device_watch import DeviceWatch
from pipelinerl_weights.manifest import Manifest, TensorSpec

BODY = {"prompt_token_ids": [1, 2], "max_tokens": 4}


@asynccontextmanager
async def serving(
    engine: FakeEngine, version: int = 0, drain_s: float = 30.0
) -> AsyncIterator[tuple[Client, RunningGenerator]]:
    metrics = GeneratorMetrics()
    updater = WeightUpdater(
        engine, WeightLayout({"w": (2, 3)}), metrics, initial_version=version, running=lambda: 0
    )
    limits = RequestLimits(max_model_len=16, max_running_requests=2, vocabulary=10)
    serve = RequestHandler(engine, None, limits, metrics, lambda: updater.version, model="job")
    generator = RunningGenerator(engine, serve, updater, metrics, None, drain_s)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        async with serve_http(create_app(generator), listening):
            yield Client(f"http://127.0.0.1:{listening.getsockname()[1]}"), generator


async def test_health_fails_while_the_device_does_not_answer_and_never_waits_for_it() -> None:
    answers, hangs = threading.Event(), threading.Event()

    def query() -> None:
        if hangs.is_set():
            answers.wait(60)
        if broken:
            raise Unavailable("device 0: GPU is lost")

    broken = True
    watch = DeviceWatch(query, period_s=0.01, limit_s=0.2)
    try:
        async with serving(FakeEngine()) as (client, generator):
            generator.device_fault = watch.fault

            async def until_health(expected: int) -> None:
                async def has_come() -> bool:
                    return bool((await client.call("GET", "/health"))[0] == expected)

                await until(has_come)

            await until_health(503)
            assert watch.fault() == "device 0: GPU is lost"
            broken = False
            await until_health(200)
            hangs.set()
            await until_health(503)
            assert watch.fault() == "no answer within 0.2 s"
            answers.set()
            await until_health(200)
    finally:
        answers.set()
        watch.close()


async def test_nothing_is_served_before_the_first_weights() -> None:
    async with serving(FakeEngine(), version=-1) as (client, _):
        assert (await client.call("GET", "/health"))[0] == 200
        assert (await client.call("GET", "/ready"))[0] == 503
        assert (await client.weights())["version"] == -1
        for path, body in (
            ("/v1/chat/completions", BODY),
            ("/v1/score", {"sequences": [{"token_ids": [1, 2], "start": 1}]}),
        ):
            async with (
                aiohttp.ClientSession() as session,
                session.post(client.url + path, json=body) as response,
            ):
                assert response.status == 503
                assert response.headers["Retry-After"] == "1"
                assert "no weights" in (await response.json())["error"]["message"]


async def test_too_many_waiting_sequences_are_turned_away_and_the_engine_is_asked_for_each_choice() -> (  # noqa: E501
    None
):
    engine = FakeEngine()
    async with serving(engine) as (client, _):
        first = asyncio.create_task(client.call("POST", "/v1/chat/completions", {**BODY, "n": 30}))

        async def full() -> bool:
            return engine.num_decoding == 30

        await until(full)
        status, answer = await client.call("POST", "/v1/chat/completions", {**BODY, "n": 3})
        assert status == 503
        assert answer["error"]["message"] == "30 sequences run or wait, and at most 32 may"
        engine.gate.set()
        status, answer = await first
        assert status == 200
        assert [choice["index"] for choice in answer["choices"]] == list(range(30))


async def test_one_choice_that_fails_stops_the_others() -> None:
    engine = FakeEngine(failing={"score": RuntimeError("kernel fault")})
    async with serving(engine) as (client, _):
        sequences = [{"token_ids": [1, 2], "start": 1}] * 2
        status, answer = await client.call("POST", "/v1/score", {"sequences": sequences})
        assert status == 500
        assert "kernel fault" in answer["error"]["message"]
        assert (await client.weights())["num_running"] == 0


async def test_a_client_that_leaves_stops_the_decode() -> None:
    engine = FakeEngine()
    async with serving(engine) as (client, _):
        leaving = asyncio.create_task(client.call("POST", "/v1/chat/completions", {**BODY, "n": 2}))

        async def decoding(number: int) -> bool:
            return engine.num_decoding == number

        await until(lambda: decoding(2))
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await until(lambda: decoding(0))


async def test_draining_takes_nothing_new_and_waits_for_what_runs() -> None:
    engine = FakeEngine()
    async with serving(engine) as (client, generator):
        running = asyncio.create_task(client.call("POST", "/v1/chat/completions", BODY))

        async def decoding() -> bool:
            return engine.num_decoding == 1

        await until(decoding)
        draining = asyncio.create_task(client.call("POST", "/drain"))

        async def refuses() -> bool:
            return (await client.call("GET", "/ready"))[0] == 503

        await until(refuses)
        assert (await client.call("POST", "/v1/chat/completions", BODY))[0] == 503
        assert not draining.done()
        engine.gate.set()
        assert await draining == (200, {"drained": True})
        assert (await running)[0] == 200
        assert generator.requests.draining


async def test_a_drain_that_takes_too_long_says_so() -> None:
    engine = FakeEngine()
    async with serving(engine, drain_s=0.05) as (client, _):
        running = asyncio.create_task(client.call("POST", "/v1/chat/completions", BODY))

        async def decoding() -> bool:
            return engine.num_decoding == 1

        await until(decoding)
        assert await client.call("POST", "/drain") == (200, {"drained": False})
        engine.gate.set()
        await running


async def test_a_fatal_error_answers_and_ends_the_process() -> None:
    engine = FakeEngine(failing={"apply": RuntimeError("device fault")})
    async with serving(engine) as (client, generator):
        group = {
            "epoch": 1,
            "master_address": "127.0.0.1",
            "master_port": 1,
            "rank_offset": 1,
            "world_size": 2,
            "backend": "gloo",
            "timeout_s": 5,
        }
        assert (await client.call("POST", "/init_process_group", group))[0] == 200
        manifest = {
            "tensors": [{"name": "w", "dtype": "float32", "shape": [2, 3]}],
            "bucket_bytes": 64,
        }
        body: dict[str, Any] = {"epoch": 1, "version": 1, "manifest": manifest, "timeout_s": 5}
        status, answer = await client.call("POST", "/request_weight_update", body)
        assert status == 500
        assert answer["error"]["type"] == "FatalError"
        with pytest.raises(FatalError, match="device fault"):
            await asyncio.wait_for(generator.watch(), 5)


async def test_an_unknown_manifest_is_refused_before_anything_happens_and_then_sent_along() -> None:
    engine = FakeEngine()
    manifest = Manifest((TensorSpec("w", "float32", (2, 3)),), 64)
    async with serving(engine) as (http, generator):
        client = GeneratorClient(http.url)

        async def join(epoch: int) -> None:
            request = InitGroupRequest(
                epoch=epoch,
                master_address="127.0.0.1",
                master_port=1,
                rank_offset=1,
                world_size=2,
                backend="gloo",
                timeout_s=5,
            )
            await client.init_process_group(request)
            engine.verbs.clear()

        def update(epoch: int, version: int, **fields: Any) -> UpdateRequest:
            return UpdateRequest(epoch=epoch, version=version, timeout_s=5, **fields)

        for epoch in (1, 2):  # a group that is formed again knows no manifest
            await join(epoch)
            num_failures = generator.updater.num_failures
            with pytest.raises(GeneratorRefused, match="send it in full") as refused:
                await client.update_weights(update(epoch, 1, manifest_hash=manifest.hash))
            assert (refused.value.status, refused.value.kind) == (409, "UnknownManifest")
            assert (engine.verbs, generator.updater.num_failures) == ([], num_failures)
            await client.update_weights(update(epoch, 1, manifest=manifest.to_json()))
            assert "stage" in engine.verbs
            by_hash = update(epoch, 2, manifest_hash=manifest.hash, mode="inplace")
            assert (await client.update_weights(by_hash)).version == 2
            engine.verbs.clear()
            other = Manifest((TensorSpec("w", "float32", (3, 3)),), 64)
            with pytest.raises(GeneratorRefused, match="does not fit the model") as mismatch:
                await client.update_weights(update(epoch, 3, manifest=other.to_json()))
            assert (mismatch.value.status, mismatch.value.kind) == (422, "ManifestMismatch")
            with pytest.raises(GeneratorRefused, match="not a weight manifest") as malformed:
                await client.update_weights(update(epoch, 3, manifest={"tensors": [{}]}))
            assert malformed.value.status == 422
            assert (engine.verbs, generator.updater.version) == ([], 2)
            generator.updater.version = 0


async def test_unknown_paths_and_broken_bodies_answer_in_the_same_form() -> None:
    async with serving(FakeEngine()) as (client, _):
        status, answer = await client.call("GET", "/nothing")
        assert (status, answer["error"]["type"]) == (404, "HTTPException")
        status, answer = await client.call(
            "POST", "/v1/score", {"sequences": [{"token_ids": [1, 2], "start": 2}]}
        )
        assert status == 422
        assert "start=2 is not below the 2 token ids" in answer["error"]["message"]
