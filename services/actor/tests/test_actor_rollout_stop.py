"""Stopping an actor: what runs may finish, what does not is handed back, and the process ends as it
should.
"""

import asyncio
import os
import signal
import sys
from typing import Any

from actor_fakes import until
from actor_harness import ActorHarness, acting, alive, free_port, wiring_of
from aiohttp import web

from pipelinerl.v1 import admission_pb2 as pb
from pipelinerl_actor.rollout.start import run_actor
from pipelinerl_common.child_process import send_signal, stop


async def test_an_end_of_run_stops_what_is_being_decoded(harness: ActorHarness) -> None:
    harness.admission.to_grant = 2
    harness.generator.answer = harness.generator.hang
    async with acting(harness, "Together") as (actor, _):
        await alive(actor, lambda: harness.generator.num_running == 2)
    await until(lambda: harness.generator.num_cancelled == 2)


async def test_a_stop_lets_groups_finish_and_takes_no_new_ones(harness: ActorHarness) -> None:
    release = asyncio.Event()

    async def answer(body: dict[str, Any]) -> web.StreamResponse:
        await release.wait()
        return await harness.generator.say(body)

    harness.generator.answer = answer
    harness.admission.to_grant = 1
    async with acting(harness, "Together", actors={"drainSeconds": 20}) as (actor, stop):
        await alive(actor, lambda: harness.generator.num_running == 1)
        stop.set()
        await alive(actor, lambda: harness.admission.requests[-1].max_groups == 0)
        harness.admission.to_grant = 5
        release.set()
        await until(actor.done)
    await until(lambda: len(harness.groups) == 1)
    assert harness.admission.num_granted == 1


async def test_a_stop_hands_back_what_does_not_finish_in_time(harness: ActorHarness) -> None:
    harness.admission.to_grant = 2
    harness.generator.answer = harness.generator.hang
    async with acting(harness, "Together", actors={"drainSeconds": 0.2}) as (actor, stop):
        await alive(actor, lambda: harness.generator.num_running == 2)
        stop.set()
        await until(actor.done)
    handed_back = harness.admission.outcomes(pb.GROUP_OUTCOME_HANDED_BACK)
    assert sorted(event.lease_id for event in handed_back) == ["lease-0", "lease-1"]
    await until(lambda: harness.generator.num_running == 0)


async def test_a_stop_hands_back_groups_that_have_not_even_begun(harness: ActorHarness) -> None:
    harness.admission.to_grant = 1
    wiring = wiring_of(harness, {"path": "harness_tasks:Together"}, {"drainSeconds": 0})
    stop = asyncio.Event()
    harness.admission.on_grant = stop.set
    async with asyncio.timeout(20):
        await run_actor(wiring, stop)
    assert [
        event.lease_id for event in harness.admission.outcomes(pb.GROUP_OUTCOME_HANDED_BACK)
    ] == ["lease-0"]


async def test_an_actor_whose_generator_serves_nothing_ends_when_it_is_asked_to(
    harness: ActorHarness,
) -> None:
    wiring = wiring_of(
        harness, {"path": "harness_tasks:Together"}, {}, [f"http://127.0.0.1:{free_port()}"]
    )
    stop = asyncio.Event()
    stop.set()
    async with asyncio.timeout(20):
        await run_actor(wiring, stop)
    assert harness.admission.num_granted == 0


async def _process(harness: ActorHarness, *flags: str) -> asyncio.subprocess.Process:
    wiring = wiring_of(harness, {"path": "harness_tasks:Together"}, {"drainSeconds": 0.1})
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *(
            "-m",
            "pipelinerl_actor.rollout",
            "--job",
            str(wiring.job_file),
            "--output",
            str(harness.folder),
        ),
        *("--nats-url", harness.nats.url, "--preprocessor", harness.preprocessor, *flags),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(harness.folder)},
    )


async def test_sigterm_hands_back_and_ends_the_process_with_0(harness: ActorHarness) -> None:
    harness.admission.to_grant = 1
    harness.generator.answer = harness.generator.hang
    process = await _process(harness, "--generator", harness.generator.url)
    try:
        await until(lambda: harness.generator.num_running == 1)
        send_signal(process, signal.SIGTERM)
        async with asyncio.timeout(20):
            _, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        assert len(harness.admission.outcomes(pb.GROUP_OUTCOME_HANDED_BACK)) == 1
        await until(lambda: harness.generator.num_running == 0)
    finally:
        await stop(process, 0)


async def test_a_process_with_wrong_wiring_ends_with_2_and_says_why(harness: ActorHarness) -> None:
    process = await _process(harness)
    async with asyncio.timeout(30):
        _, errors = await process.communicate()
    assert process.returncode == 2
    assert b"--generator is missing" in errors
