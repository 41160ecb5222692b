"""An actor's peers come late, go away, refuse, or hang: generators, the preprocessor, the stream's
server.
"""

import asyncio
import os
import signal
import socket
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from actor_fakes import FakeGenerator, until
from actor_harness import JOB, ActorHarness, acting, alive, free_port, wiring_of
from aiohttp import web

from pipelinerl.v1 import admission_pb2 as pb
from pipelinerl_actor.rollout import generator_client
from pipelinerl_actor.rollout.generator_client import RolloutClient
from pipelinerl_actor.rollout.generators import Generators
from pipelinerl_actor.rollout.metrics import RolloutMeter
from pipelinerl_actor.rollout.start import run_actor
from pipelinerl_common import stream
from pipelinerl_common.errors import PermanentError, SettingsError
from pipelinerl_common.metrics import ACTOR, Metrics
from pipelinerl_common.service import cancel_all
from pipelinerl_common.settings import StreamSettings


async def test_a_generator_that_serves_nothing_yet_is_waited_for_without_using_up_tries(
    harness: ActorHarness,
) -> None:
    harness.generator.script.extend(
        [harness.generator.status(503, "no weights yet", Retry_After="0.05")] * 4
    )
    harness.admission.to_grant = 1
    async with acting(harness, "Together") as (actor, _):
        await alive(actor, lambda: harness.groups)
    assert len(harness.generator.requests) == 5


async def test_a_connection_that_breaks_during_a_request_and_an_internal_error_are_tried_again(
    harness: ActorHarness,
) -> None:
    harness.generator.script.extend([harness.generator.reset, harness.generator.status(500)])
    harness.admission.to_grant = 1
    async with acting(harness, "Together") as (actor, _):
        await alive(actor, lambda: harness.groups)
        await alive(
            actor,
            lambda: (
                harness.metrics
                and harness.last_metric("rollout_errors_total{reason=generator_error}") == 2
            ),
        )


async def test_a_refused_token_ends_the_actor_with_a_clear_error(harness: ActorHarness) -> None:
    harness.generator.answer = harness.generator.status(401, "the bearer token is wrong")
    harness.admission.to_grant = 1
    with pytest.raises(ExceptionGroup) as raised:
        async with acting(harness, "Together") as (actor, _):
            await actor
    assert raised.group_contains(SettingsError, match="--token-file")


async def test_the_token_goes_to_the_generators_and_a_preprocessor_that_refuses_it_ends_the_actor(
    harness: ActorHarness,
) -> None:
    harness.token_file = harness.folder / "token"
    harness.token_file.write_text("secret\n")
    harness.admission.to_grant = 1
    async with acting(harness, "Together") as (actor, _):
        await alive(actor, lambda: harness.groups)
    assert harness.generator.headers[0]["Authorization"] == "Bearer secret"
    async with harness.admission.serving(token="another") as address:
        harness.preprocessor = address
        with pytest.raises(ExceptionGroup) as raised:
            async with acting(harness, "Together") as (actor, _):
                await actor
        assert raised.group_contains(PermanentError, match="UNAUTHENTICATED")


async def test_missing_peers_are_named(harness: ActorHarness) -> None:
    with pytest.raises(SettingsError, match="--generator is missing"):
        await run_actor(
            wiring_of(harness, {"path": "harness_tasks:Alone"}, {}, generators=()), asyncio.Event()
        )
    harness.preprocessor = ""
    with pytest.raises(SettingsError, match="--preprocessor is missing"):
        await run_actor(wiring_of(harness, {"path": "harness_tasks:Alone"}, {}), asyncio.Event())


async def test_a_preprocessor_that_is_away_is_waited_for_and_nothing_is_lost(
    harness: ActorHarness,
) -> None:
    harness.preprocessor = f"127.0.0.1:{free_port()}"
    async with acting(harness, "Together") as (actor, _):
        for num_groups in (2, 4):
            async with harness.admission.serving(harness.preprocessor):
                harness.admission.to_grant = 2
                await alive(actor, lambda expected=num_groups: len(harness.groups) == expected)  # type: ignore[misc]


async def test_a_run_that_is_done_and_goes_on_finds_its_actor_there(harness: ActorHarness) -> None:
    harness.admission.done = True
    harness.generator.answer = harness.generator.hang
    async with acting(harness, "Together") as (actor, _):
        await alive(actor, lambda: len(harness.admission.requests) >= 3)
        harness.admission.done = False
        harness.admission.to_grant = 2
        await alive(actor, lambda: harness.generator.num_running == 2)
        harness.admission.done = True
        await alive(actor, lambda: len(harness.admission.outcomes(pb.GROUP_OUTCOME_CANCELLED)) == 2)
        assert not actor.done()


@pytest.mark.parametrize("is_there", [False, True], ids=["no listener", "without weights yet"])
async def test_nothing_is_leased_before_a_generator_serves(
    harness: ActorHarness, is_there: bool
) -> None:
    """Groups that wait for a model to load would be missing in the batches of the others."""
    fake, port = FakeGenerator(), free_port()
    fake.is_ready = False
    harness.admission.to_grant = 1
    async with AsyncExitStack() as stack:
        if is_there:
            await stack.enter_async_context(fake.serving(port))
        async with acting(harness, "Together", generators=[f"http://127.0.0.1:{port}"]) as (
            actor,
            _,
        ):
            await alive(actor, lambda: len(harness.metrics) >= 2)
            assert harness.admission.requests == []
            fake.is_ready = True
            if not is_there:
                await stack.enter_async_context(fake.serving(port))
            await alive(actor, lambda: harness.groups)
    assert not harness.failures()


async def test_a_generator_that_is_away_is_waited_for_and_gets_no_more_groups(
    harness: ActorHarness,
) -> None:
    harness.generator.answer = harness.generator.status(503, Retry_After="0.05")
    harness.admission.to_grant = 1
    async with acting(harness, "Together") as (actor, _):
        await alive(
            actor,
            lambda: (
                harness.metrics
                and harness.last_metric("rollout_errors_total{reason=generator_away}") >= 2
            ),
        )
        harness.generator.is_ready = False
        await alive(actor, lambda: harness.admission.requests[-1].max_groups == 0)
        harness.admission.to_grant = 5
        await alive(actor, lambda: len(harness.metrics) >= 4)
        assert harness.admission.num_granted == 1
        harness.generator.is_ready = True
        harness.generator.answer = harness.generator.say
        await alive(actor, lambda: len(harness.groups) == 6)


async def test_a_generator_that_hangs_does_not_hold_back_the_news_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generator_client, "_READY_S", 600.0)
    fake = FakeGenerator()
    fake.is_ready = False
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hanging = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with fake.serving(), aiohttp.ClientSession() as session:
            clients = [RolloutClient(url, session, None) for url in (hanging, fake.url)]
            generators = Generators(
                clients, max_running=8, max_retries=0, meter=RolloutMeter(Metrics(ACTOR, JOB))
            )
            watching = asyncio.create_task(generators.watch())
            try:
                await until(lambda: fake.num_looks >= 2)
                assert generators.num_serving_slots == 0
                fake.is_ready = True
                await until(lambda: generators.num_serving_slots == 8)
            finally:
                await cancel_all([watching])


async def test_requests_go_to_the_generator_that_is_well_and_least_loaded(
    harness: ActorHarness,
) -> None:
    second = FakeGenerator()
    second.answer = second.hang
    harness.generator.answer = harness.generator.hang
    dead = f"http://127.0.0.1:{free_port()}"
    async with second.serving():
        harness.admission.to_grant = 4
        urls = [dead, harness.generator.url, second.url]
        async with acting(harness, "Together", generators=urls) as (actor, _):
            await alive(
                actor, lambda: harness.generator.num_running == 2 and second.num_running == 2
            )


async def test_a_finished_group_survives_a_crash_of_the_stream_server(
    harness: ActorHarness,
) -> None:
    release = asyncio.Event()

    async def answer(body: dict[str, Any]) -> web.StreamResponse:
        await release.wait()
        return await harness.generator.say(body)

    harness.generator.answer = answer
    harness.admission.to_grant = 1
    folder = harness.folder / "own-nats"
    async with stream.NatsServer.start(folder) as first:
        harness.nats, port = first, first.port
        async with acting(harness, "Together") as (actor, _):
            await alive(actor, lambda: harness.generator.num_running == 1)
            os.kill(first.pid, signal.SIGKILL)
            await first.wait()
            release.set()
            await alive(actor, lambda: harness.generator.num_running == 0)
            async with (
                stream.NatsServer.start(folder, port) as second,
                stream.connect(second.url, JOB, StreamSettings(), name="reader") as reader,
                reader.samples(max_pending=10) as received,
                asyncio.timeout(30),
            ):
                group = await anext(aiter(received))
                assert group.group.group_id == "0-0"
                await group.ack()


async def test_the_generators_load_is_told_to_the_preprocessor(harness: ActorHarness) -> None:
    harness.generator.answer = harness.generator.hang
    harness.admission.to_grant = 1
    async with acting(
        harness, "Together", generators=[harness.generator.url, "http://127.0.0.1:9"]
    ) as (actor, _):
        await alive(actor, lambda: any(load.num_running == 4 for load in harness.admission.loads))
        harness.admission.to_cancel = ["lease-0"]
        await alive(actor, lambda: harness.generator.num_running == 0)
    load = harness.admission.loads[0]
    assert (load.generator, load.kv_usage, load.kv_tokens, load.steps_total) == (
        harness.generator.url,
        0.25,
        64,
        3,
    )
    assert {load.generator for load in harness.admission.loads} == {harness.generator.url}
    asked = [load.requested_seconds_total for load in harness.admission.loads]
    assert asked == sorted(asked)
    assert asked[-1] > asked[0]
