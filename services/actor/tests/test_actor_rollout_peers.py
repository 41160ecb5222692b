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
from actor_house import JOB, House, acting, alive, free_port, wiring_of
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
    house: House,
) -> None:
    house.generator.script.extend(
        [house.generator.status(503, "no weights yet", Retry_After="0.05")] * 4
    )
    house.admission.to_grant = 1
    async with acting(house, "Together") as (actor, _):
        await alive(actor, lambda: house.groups)
    assert len(house.generator.requests) == 5


async def test_a_connection_that_breaks_during_a_request_and_an_internal_error_are_tried_again(
    house: House,
) -> None:
    house.generator.script.extend([house.generator.reset, house.generator.status(500)])
    house.admission.to_grant = 1
    async with acting(house, "Together") as (actor, _):
        await alive(actor, lambda: house.groups)
        await alive(
            actor,
            lambda: (
                house.metrics
                and house.last_metric("rollout_errors_total{reason=generator_error}") == 2
            ),
        )


async def test_a_refused_token_ends_the_actor_with_a_clear_error(house: House) -> None:
    house.generator.answer = house.generator.status(401, "the bearer token is wrong")
    house.admission.to_grant = 1
    with pytest.raises(ExceptionGroup) as raised:
        async with acting(house, "Together") as (actor, _):
            await actor
    assert raised.group_contains(SettingsError, match="--token-file")


async def test_the_token_goes_to_the_generators_and_a_preprocessor_that_refuses_it_ends_the_actor(
    house: House,
) -> None:
    house.token_file = house.folder / "token"
    house.token_file.write_text("secret\n")
    house.admission.to_grant = 1
    async with acting(house, "Together") as (actor, _):
        await alive(actor, lambda: house.groups)
    assert house.generator.headers[0]["Authorization"] == "Bearer secret"
    async with house.admission.serving(token="another") as address:
        house.preprocessor = address
        with pytest.raises(ExceptionGroup) as raised:
            async with acting(house, "Together") as (actor, _):
                await actor
        assert raised.group_contains(PermanentError, match="UNAUTHENTICATED")


async def test_missing_peers_are_named(house: House) -> None:
    with pytest.raises(SettingsError, match="--generator is missing"):
        await run_actor(
            wiring_of(house, {"path": "house_tasks:Alone"}, {}, generators=()), asyncio.Event()
        )
    house.preprocessor = ""
    with pytest.raises(SettingsError, match="--preprocessor is missing"):
        await run_actor(wiring_of(house, {"path": "house_tasks:Alone"}, {}), asyncio.Event())


async def test_a_preprocessor_that_is_away_is_waited_for_and_nothing_is_lost(house: House) -> None:
    house.preprocessor = f"127.0.0.1:{free_port()}"
    async with acting(house, "Together") as (actor, _):
        for num_groups in (2, 4):
            async with house.admission.serving(house.preprocessor):
                house.admission.to_grant = 2
                await alive(actor, lambda expected=num_groups: len(house.groups) == expected)  # type: ignore[misc]


async def test_a_run_that_is_done_and_goes_on_finds_its_actor_there(house: House) -> None:
    house.admission.done = True
    house.generator.answer = house.generator.hang
    async with acting(house, "Together") as (actor, _):
        await alive(actor, lambda: len(house.admission.requests) >= 3)
        house.admission.done = False
        house.admission.to_grant = 2
        await alive(actor, lambda: house.generator.num_running == 2)
        house.admission.done = True
        await alive(actor, lambda: len(house.admission.outcomes(pb.GROUP_OUTCOME_CANCELLED)) == 2)
        assert not actor.done()


@pytest.mark.parametrize("is_there", [False, True], ids=["nobody listens", "without weights yet"])
async def test_nothing_is_leased_before_a_generator_serves(house: House, is_there: bool) -> None:
    """Groups that wait for a model to load would be missing in the batches of the others."""
    fake, port = FakeGenerator(), free_port()
    fake.is_ready = False
    house.admission.to_grant = 1
    async with AsyncExitStack() as stack:
        if is_there:
            await stack.enter_async_context(fake.serving(port))
        async with acting(house, "Together", generators=[f"http://127.0.0.1:{port}"]) as (actor, _):
            await alive(actor, lambda: len(house.metrics) >= 2)
            assert house.admission.requests == []
            fake.is_ready = True
            if not is_there:
                await stack.enter_async_context(fake.serving(port))
            await alive(actor, lambda: house.groups)
    assert not house.failures()


async def test_a_generator_that_is_away_is_waited_for_and_gets_no_more_groups(house: House) -> None:
    house.generator.answer = house.generator.status(503, Retry_After="0.05")
    house.admission.to_grant = 1
    async with acting(house, "Together") as (actor, _):
        await alive(
            actor,
            lambda: (
                house.metrics
                and house.last_metric("rollout_errors_total{reason=generator_away}") >= 2
            ),
        )
        house.generator.is_ready = False
        await alive(actor, lambda: house.admission.requests[-1].max_groups == 0)
        house.admission.to_grant = 5
        await alive(actor, lambda: len(house.metrics) >= 4)
        assert house.admission.num_granted == 1
        house.generator.is_ready = True
        house.generator.answer = house.generator.say
        await alive(actor, lambda: len(house.groups) == 6)


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


async def test_requests_go_to_the_generator_that_is_well_and_least_loaded(house: House) -> None:
    second = FakeGenerator()
    second.answer = second.hang
    house.generator.answer = house.generator.hang
    dead = f"http://127.0.0.1:{free_port()}"
    async with second.serving():
        house.admission.to_grant = 4
        urls = [dead, house.generator.url, second.url]
        async with acting(house, "Together", generators=urls) as (actor, _):
            await alive(actor, lambda: house.generator.num_running == 2 and second.num_running == 2)


async def test_a_finished_group_survives_a_crash_of_the_stream_server(house: House) -> None:
    release = asyncio.Event()

    async def answer(body: dict[str, Any]) -> web.StreamResponse:
        await release.wait()
        return await house.generator.say(body)

    house.generator.answer = answer
    house.admission.to_grant = 1
    folder = house.folder / "own-nats"
    async with stream.NatsServer.start(folder) as first:
        house.nats, port = first, first.port
        async with acting(house, "Together") as (actor, _):
            await alive(actor, lambda: house.generator.num_running == 1)
            os.kill(first.pid, signal.SIGKILL)
            await first.wait()
            release.set()
            await alive(actor, lambda: house.generator.num_running == 0)
            async with (
                stream.NatsServer.start(folder, port) as second,
                stream.connect(second.url, JOB, StreamSettings(), name="reader") as reader,
                reader.samples(max_pending=10) as received,
                asyncio.timeout(30),
            ):
                group = await anext(aiter(received))
                assert group.group.group_id == "0-0"
                await group.ack()


async def test_the_generators_load_is_told_to_the_preprocessor(house: House) -> None:
    house.generator.answer = house.generator.hang
    house.admission.to_grant = 1
    async with acting(
        house, "Together", generators=[house.generator.url, "http://127.0.0.1:9"]
    ) as (actor, _):
        await alive(actor, lambda: any(load.num_running == 4 for load in house.admission.loads))
        house.admission.to_cancel = ["lease-0"]
        await alive(actor, lambda: house.generator.num_running == 0)
    load = house.admission.loads[0]
    assert (load.generator, load.kv_usage, load.kv_tokens, load.steps_total) == (
        house.generator.url,
        0.25,
        64,
        3,
    )
    assert {load.generator for load in house.admission.loads} == {house.generator.url}
    asked = [load.requested_seconds_total for load in house.admission.loads]
    assert asked == sorted(asked)
    assert asked[-1] > asked[0]
