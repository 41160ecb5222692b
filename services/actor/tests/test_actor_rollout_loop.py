"""The whole rollout loop against a real nats-server, real gRPC and a generator over real HTTP."""

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from actor_fakes import FakeAdmission, FakeGenerator, choice, completion, until
from aiohttp import web

from pipelinerl.v1 import admission_pb2 as pb
from pipelinerl.v1 import sample_pb2
from pipelinerl.v1.metrics_pb2 import MetricsRecord
from pipelinerl_actor.rollout import generator_client
from pipelinerl_actor.rollout.actor import run_actor
from pipelinerl_actor.rollout.beginning import Beginning
from pipelinerl_actor.rollout.generator_client import GeneratorClient
from pipelinerl_actor.rollout.generators import Generators
from pipelinerl_actor.rollout.meter import Meter
from pipelinerl_common import stream
from pipelinerl_common.errors import PermanentError, SettingsError
from pipelinerl_common.metrics import ACTOR, Metrics
from pipelinerl_common.service import Wiring, cancel_all
from pipelinerl_common.settings import StreamSettings
from pipelinerl_common.types import FinishReason, SampleGroup, VersionRun

JOB = "rollout-test"

TASKS = """
import asyncio, math, time
from pipelinerl_actor.task import Prompt, Task, Verdict
from pipelinerl_common.errors import TemporaryError

class Base(Task):
    def prompt(self, index):
        return Prompt.of(f"prompt {index}", answer="7")
    async def verify(self, prompt, answer):
        return Verdict(float(answer.text == prompt.facts["answer"]), {"success": 1.0})

class Together(Base): pass

class Alone(Base):
    async def rollout(self, rollout):
        return await rollout.verify(await rollout.chat(rollout.prompt.messages))

class BrokenPrompt(Base):
    def prompt(self, index):
        raise KeyError("no such prompt")

class BrokenRollout(Base):
    async def rollout(self, rollout):
        raise ZeroDivisionError("task is broken")

class NotANumber(Base):
    async def verify(self, prompt, answer):
        return Verdict(math.nan)

class OneNotANumber(Alone):
    async def rollout(self, rollout):
        verdict = await super().rollout(rollout)
        return Verdict(math.inf) if rollout.sample_index == 1 else verdict

class Hangs(Base):
    async def verify(self, prompt, answer):
        await asyncio.Event().wait()

class HangsHard(Base):
    def verify(self, prompt, answer):
        if prompt.messages[0]["content"] == "prompt 0":
            time.sleep(3600)
        return Verdict(1.0)

class ShakyEnvironment(Alone):
    calls = {}
    async def rollout(self, rollout):
        number = self.calls[rollout.sample_index] = self.calls.get(rollout.sample_index, 0) + 1
        if number < 3:
            raise TemporaryError("the environment is away")
        return await super().rollout(rollout)

class Lazy(Base):
    async def rollout(self, rollout):
        return Verdict(1.0)

async def function(rollout, *, right: str):
    turn = await rollout.chat([{"role": "user", "content": f"{rollout.seed} {rollout.prompt_index}"}])
    return Verdict(float(turn.text == right) + rollout.sample_index)
"""


@dataclass
class House:
    """The actor's surroundings."""

    folder: Path
    generator: FakeGenerator
    admission: FakeAdmission
    nats: stream.NatsServer
    preprocessor: str = ""
    groups: list[SampleGroup] = field(default_factory=list)
    metrics: list[MetricsRecord] = field(default_factory=list)
    token_file: Path | None = None

    def failures(self) -> list[tuple[str, str]]:
        return [(event.lease_id, event.reason) for event in self.admission.outcomes(pb.GROUP_OUTCOME_FAILED)]

    def last_metric(self, name: str) -> float:
        return self.metrics[-1].values.get(name, 0.0)


@pytest.fixture
async def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    (tmp_path / "house_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    generator, admission = FakeGenerator(), FakeAdmission()
    async with (
        generator.serving(),
        admission.serving() as address,
        stream.NatsServer.start(tmp_path / "nats") as nats,
        stream.connect(nats.url, JOB, StreamSettings(), name="test") as reader,
        reader.samples(max_pending=1000) as received,
        reader.metrics() as records,
    ):
        house = House(tmp_path, generator, admission, nats, address)

        async def read_groups() -> None:
            async for each in received:
                house.groups.append(each.group)
                await each.ack()

        async def read_metrics() -> None:
            async for record in records:
                house.metrics.append(record)

        reading = [asyncio.ensure_future(read_groups()), asyncio.ensure_future(read_metrics())]
        yield house
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


def _wiring(
    house: House, task: dict[str, Any], actors: dict[str, Any], generators: Sequence[str] | None = None, model_len: int = 64
) -> Wiring:
    document = {
        "apiVersion": "pipelinerl.dev/v1alpha1",
        "kind": "PipelineRLJob",
        "metadata": {"name": JOB},
        "spec": {
            "model": {"uri": "unused", "maxModelLen": model_len},
            "task": {"groupSize": 4, "maxRetries": 2, "sampling": {"maxTokens": 8}, **task},
            "actors": actors,
        },
    }
    job_file = house.folder / "job.yaml"
    job_file.write_text(yaml.safe_dump(document))
    return Wiring(
        job_file=job_file,
        name="actor-0",
        output=house.folder,
        listen="127.0.0.1:0",
        nats_url=house.nats.url,
        preprocessor=house.preprocessor,
        coordinator="",
        generators=tuple(generators if generators is not None else (house.generator.url,)),
        references=(),
        token_file=house.token_file,
        log_level="info",
    )


@asynccontextmanager
async def acting(
    house: House,
    task: str,
    *,
    actors: dict[str, Any] | None = None,
    generators: Sequence[str] | None = None,
    model_len: int = 64,
    **task_fields: Any,
) -> AsyncIterator[tuple[asyncio.Task[None], asyncio.Event]]:
    """Runs an actor with `task` while the block runs; it must end cleanly when it is stopped after the run."""
    wiring = _wiring(house, {"path": f"house_tasks:{task}", **task_fields}, actors or {}, generators, model_len)
    stop = asyncio.Event()
    actor = asyncio.ensure_future(run_actor(wiring, stop))
    try:
        yield actor, stop
        house.admission.done = True
        stop.set()
        async with asyncio.timeout(20):
            await actor
    finally:
        actor.cancel()
        await asyncio.gather(actor, return_exceptions=True)


async def alive(actor: asyncio.Task[None], condition: Callable[[], object]) -> None:
    """Until the condition holds; an actor that ends before fails the test with its own error."""
    await until(lambda: actor.done() or condition())
    if actor.done() and not condition():
        await actor
        raise AssertionError("the actor ended")


async def test_leased_groups_are_sampled_verified_and_published_once(house: House) -> None:
    house.admission.to_grant = 3
    async with acting(house, "Together") as (actor, _):
        await alive(actor, lambda: len(house.groups) == 3)
    by_id = {group.group_id: group for group in house.groups}
    assert sorted(by_id) == ["0-0", "0-1", "0-2"]
    group = by_id["0-1"]  # type: ignore[index]
    assert (group.job, group.attempt, group.prompt_index, group.temperature) == (JOB, 1, 1, 1.0)
    assert [sample.index for sample in group.samples] == [0, 1, 2, 3]
    sample = group.samples[2]
    assert sample.token_ids_S.tolist() == [4, 9, 2, 5, ord("7"), 2]
    assert sample.segment_lengths == (4, 2)
    assert sample.logprobs_T.tolist() == [-0.5, -0.5]
    assert sample.version_runs == (VersionRun(0, 2),)
    assert (sample.reward, sample.metrics, sample.finish_reason) == (1.0, {"success": 1.0}, FinishReason.STOP)
    started = house.admission.outcomes(pb.GROUP_OUTCOME_STARTED)
    assert sorted(event.lease_id for event in started) == ["lease-0", "lease-1", "lease-2"]
    assert {event.served_version for event in started} == {3}
    assert not house.failures()


async def test_a_single_turn_group_of_short_completions_is_one_request(house: House) -> None:
    house.admission.to_grant = 1
    async with acting(house, "Together") as (actor, _):
        await alive(actor, lambda: house.groups)
    assert [request["n"] for request in house.generator.requests] == [4]


async def test_a_task_with_its_own_rollout_and_long_completions_are_a_request_each(house: House) -> None:
    house.admission.to_grant = 1
    async with acting(house, "Alone") as (actor, _):
        await alive(actor, lambda: house.groups)
    assert [request["n"] for request in house.generator.requests] == [1] * 4


async def test_a_group_larger_than_the_slots_is_split_into_requests_that_fit(house: House) -> None:
    house.admission.to_grant = 1
    async with acting(house, "Together", actors={"generator": {"maxRunningRequests": 3}}) as (actor, _):
        await alive(actor, lambda: house.groups)
    assert [request["n"] for request in house.generator.requests] == [3, 1]
    assert len(house.groups[0].samples) == 4


async def test_a_task_may_be_a_function(house: House) -> None:
    house.admission.to_grant = 1
    async with acting(house, "function", args={"right": "7"}) as (actor, _):
        await alive(actor, lambda: house.groups)
    assert [sample.reward for sample in house.groups[0].samples] == [1.0, 2.0, 3.0, 4.0]
    assert house.generator.requests[0]["messages"] == [{"role": "user", "content": "0 0"}]


async def test_no_more_sequences_run_than_the_generator_has_slots(house: House) -> None:
    house.admission.to_grant = 30
    async with acting(house, "Together", actors={"generator": {"maxRunningRequests": 8}}) as (actor, _):
        await alive(actor, lambda: len(house.groups) == 30)
    assert house.generator.most_sequences <= 8


async def test_only_as_many_groups_are_leased_as_keep_the_slots_busy(house: House) -> None:
    house.admission.to_grant = 1000
    house.generator.answer = house.generator.hang
    async with acting(house, "Together", actors={"generator": {"maxRunningRequests": 8}}) as (actor, _):
        await alive(actor, lambda: house.generator.num_running == 2)
        await alive(actor, lambda: any(request.max_groups == 0 for request in house.admission.requests))
        assert house.admission.num_granted == 3  # two fill 8 slots, one waits
        assert sorted(house.admission.requests[-1].running_lease_ids) == ["lease-0", "lease-1", "lease-2"]


async def test_an_end_of_run_stops_what_is_being_decoded(house: House) -> None:
    house.admission.to_grant = 2
    house.generator.answer = house.generator.hang
    async with acting(house, "Together") as (actor, _):
        await alive(actor, lambda: house.generator.num_running == 2)
    await until(lambda: house.generator.num_cancelled == 2)


async def test_a_cancelled_lease_closes_its_request_and_is_reported(house: House) -> None:
    house.admission.to_grant = 2
    house.generator.answer = house.generator.hang
    async with acting(house, "Together") as (actor, _):
        await alive(actor, lambda: house.generator.num_running == 2)
        house.admission.to_cancel = ["lease-1"]
        await alive(actor, lambda: house.generator.num_running == 1)
        await alive(actor, lambda: house.admission.outcomes(pb.GROUP_OUTCOME_CANCELLED))
    assert house.admission.outcomes(pb.GROUP_OUTCOME_CANCELLED)[0].lease_id == "lease-1"
    assert not house.groups


async def test_an_unknown_cancelled_lease_is_ignored(house: House) -> None:
    house.admission.to_grant = 1
    house.admission.to_cancel = ["lease-of-an-older-session"]
    async with acting(house, "Together") as (actor, _):
        await alive(actor, lambda: house.groups)


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ("BrokenPrompt", "task_error"),
        ("BrokenRollout", "task_error"),
        ("NotANumber", "non_finite_reward"),
        ("OneNotANumber", "non_finite_reward"),
        ("Hangs", "verifier_timeout"),
        ("Lazy", "no_turns"),
    ],
)
async def test_a_broken_task_fails_its_group_with_a_reason_and_the_actor_goes_on(house: House, task: str, reason: str) -> None:
    house.admission.to_grant = 2
    async with acting(house, task, verifierTimeoutSeconds=0.2) as (actor, _):
        await alive(actor, lambda: len(house.failures()) == 2)
        assert not actor.done()
        await alive(actor, lambda: house.metrics and house.last_metric("groups_failed_total") == 2)
        assert house.last_metric(f"rollout_errors_total{{reason={reason}}}") >= 2
    assert {reason for _, reason in house.failures()} == {reason}
    assert not house.groups


async def test_a_verifier_that_blocks_for_ever_does_not_hold_up_other_groups(house: House) -> None:
    house.admission.to_grant = 3
    async with acting(house, "HangsHard", verifierTimeoutSeconds=3.0) as (actor, _):
        await alive(actor, lambda: len(house.groups) == 2 and house.failures())
    assert house.failures() == [("lease-0", "verifier_timeout")]
    assert sorted(group.prompt_index for group in house.groups) == [1, 2]


async def test_a_group_is_published_without_its_failed_part_when_the_job_allows_it(house: House) -> None:
    house.admission.to_grant = 1
    async with acting(house, "OneNotANumber", minGroupFraction=0.75) as (actor, _):
        await alive(actor, lambda: house.groups)
    assert [sample.index for sample in house.groups[0].samples] == [0, 2, 3]


async def test_an_environment_that_is_away_for_a_moment_is_tried_again(house: House) -> None:
    house.admission.to_grant = 1
    async with acting(house, "ShakyEnvironment") as (actor, _):
        await alive(actor, lambda: house.groups)
    assert len(house.groups[0].samples) == 4


async def test_a_prompt_longer_than_the_context_fails_its_group_only(house: House) -> None:
    house.generator.script.append(house.generator.status(400, "prompt of 90 tokens and max_tokens=8 exceed the context of 64"))
    house.admission.to_grant = 2
    async with acting(house, "Together", actors={"generator": {"maxRunningRequests": 4}}) as (actor, _):
        await alive(actor, lambda: house.groups and house.failures())
    failed = house.admission.outcomes(pb.GROUP_OUTCOME_FAILED)
    assert [event.reason for event in failed] == ["http_400"]
    assert "context of 64" in failed[0].detail


async def test_an_actor_of_which_nothing_succeeds_ends_with_the_reason_as_wrong_settings(house: House) -> None:
    house.generator.answer = house.generator.status(400, "prompt of 90 tokens and max_tokens=8 exceed the context of 64")
    house.admission.to_grant = 1000
    with pytest.raises(ExceptionGroup) as ended:
        async with asyncio.timeout(60):
            await run_actor(_wiring(house, {"path": "house_tasks:Together"}, {}), asyncio.Event())
    unexpected = ended.value.split(SettingsError)[1]
    assert unexpected is None
    assert re.search(
        r"64 prompts failed for the same reason: http_400: .*exceed the context of 64; model\.maxModelLen must hold",
        str(ended.value.exceptions[0]),
    )
    assert len(house.failures()) < 200
    await until(lambda: house.metrics and house.last_metric("rollout_errors_total{reason=http_400}") >= 4 * 64)


def test_nothing_ends_where_something_succeeded_or_the_reason_changes_or_may_pass() -> None:
    def fail(beginning: Beginning, reason: str, prompts: range) -> None:
        for prompt in prompts:
            beginning.failed(prompt, reason, "why")

    beginning = Beginning()
    fail(beginning, "http_400", range(63))
    fail(beginning, "http_400", range(63))  # the same prompts once more
    fail(beginning, "timeout", range(1000))
    fail(beginning, "http_400", range(63))
    beginning.serves(1)  # other actors' groups were trained
    fail(beginning, "http_400", range(63))
    beginning.serves(1)
    with pytest.raises(SettingsError, match="64 prompts failed for the same reason: http_400: why; model"):
        beginning.failed(63, "http_400", "why")
    beginning.succeeded()
    fail(beginning, "http_400", range(1000))
    fail(Beginning(), "verifier_unavailable", range(1000))


async def test_an_empty_completion_is_a_sample_like_any_other(house: House) -> None:
    async def answer(body: dict[str, Any]) -> web.StreamResponse:
        texts = ["", "7", "7", "7"]
        choices = [choice(index, text) for index, text in enumerate(texts)]
        choices[1] |= {"token_ids": [], "token_logprobs": [], "weight_versions": [], "message": {"content": None}}
        return web.json_response({"choices": choices, "prompt_token_ids": [4, 5]})

    house.generator.answer = answer
    house.admission.to_grant = 1
    async with acting(house, "Together") as (actor, _):
        await alive(actor, lambda: house.groups)
    assert [(sample.num_sampled, sample.reward) for sample in house.groups[0].samples] == [
        (1, 0.0),
        (0, 0.0),
        (2, 1.0),
        (2, 1.0),
    ]


async def test_a_group_without_any_sampled_token_fails(house: House) -> None:
    async def answer(body: dict[str, Any]) -> web.StreamResponse:
        empty: dict[str, Any] = {"token_ids": [], "token_logprobs": [], "weight_versions": []}
        return web.json_response({"choices": [choice(i, "", **empty) for i in range(4)], "prompt_token_ids": [4, 5]})

    house.generator.answer = answer
    house.admission.to_grant = 1
    async with acting(house, "Together") as (actor, _):
        await alive(actor, house.failures)
    assert house.failures() == [("lease-0", "no_tokens")]


async def test_a_generator_that_serves_nothing_yet_is_waited_for_without_using_up_tries(house: House) -> None:
    house.generator.script.extend([house.generator.status(503, "no weights yet", Retry_After="0.05")] * 4)
    house.admission.to_grant = 1
    async with acting(house, "Together") as (actor, _):
        await alive(actor, lambda: house.groups)
    assert len(house.generator.requests) == 5


async def test_a_connection_that_breaks_during_a_request_and_an_internal_error_are_tried_again(house: House) -> None:
    house.generator.script.extend([house.generator.reset, house.generator.status(500)])
    house.admission.to_grant = 1
    async with acting(house, "Together") as (actor, _):
        await alive(actor, lambda: house.groups)
        await alive(actor, lambda: house.metrics and house.last_metric("rollout_errors_total{reason=generator_error}") == 2)


async def test_a_generator_that_always_breaks_fails_the_group_after_bounded_tries(house: House) -> None:
    house.generator.answer = house.generator.status(500, "the engine is broken")
    house.admission.to_grant = 1
    async with acting(house, "Together") as (actor, _):
        await alive(actor, house.failures)
    assert house.failures() == [("lease-0", "generator_error")]
    assert len(house.generator.requests) == 3


async def test_a_trajectory_that_takes_too_long_is_given_up_and_its_decoding_stopped(house: House) -> None:
    house.generator.answer = house.generator.hang
    house.admission.to_grant = 1
    async with acting(house, "Together", timeoutSeconds=0.3) as (actor, _):
        await alive(actor, house.failures)
    assert house.failures() == [("lease-0", "timeout")]
    await until(lambda: house.generator.num_running == 0)


async def test_a_refused_token_ends_the_actor_with_a_clear_error(house: House) -> None:
    house.generator.answer = house.generator.status(401, "the bearer token is wrong")
    house.admission.to_grant = 1
    with pytest.raises(ExceptionGroup) as raised:
        async with acting(house, "Together") as (actor, _):
            await actor
    assert raised.group_contains(SettingsError, match="--token-file")


async def test_the_token_goes_to_the_generators_and_a_preprocessor_that_refuses_it_ends_the_actor(house: House) -> None:
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


@pytest.mark.parametrize(
    ("path", "complaint"), [("house_tasks:Missing", "has no 'Missing'"), ("no_such_module:Task", "no module 'no_such_module'")]
)
async def test_a_task_that_cannot_be_loaded_ends_the_actor(house: House, path: str, complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        await run_actor(_wiring(house, {"path": path}, {}), asyncio.Event())


async def test_missing_peers_are_named(house: House) -> None:
    with pytest.raises(SettingsError, match="--generator is missing"):
        await run_actor(_wiring(house, {"path": "house_tasks:Alone"}, {}, generators=()), asyncio.Event())
    house.preprocessor = ""
    with pytest.raises(SettingsError, match="--preprocessor is missing"):
        await run_actor(_wiring(house, {"path": "house_tasks:Alone"}, {}), asyncio.Event())


async def test_a_stop_lets_groups_finish_and_takes_no_new_ones(house: House) -> None:
    release = asyncio.Event()

    async def answer(body: dict[str, Any]) -> web.StreamResponse:
        await release.wait()
        return await house.generator.say(body)

    house.generator.answer = answer
    house.admission.to_grant = 1
    async with acting(house, "Together", actors={"drainSeconds": 20}) as (actor, stop):
        await alive(actor, lambda: house.generator.num_running == 1)
        stop.set()
        await alive(actor, lambda: house.admission.requests[-1].max_groups == 0)
        house.admission.to_grant = 5
        release.set()
        await until(actor.done)
    await until(lambda: len(house.groups) == 1)
    assert house.admission.num_granted == 1


async def test_a_stop_hands_back_what_does_not_finish_in_time(house: House) -> None:
    house.admission.to_grant = 2
    house.generator.answer = house.generator.hang
    async with acting(house, "Together", actors={"drainSeconds": 0.2}) as (actor, stop):
        await alive(actor, lambda: house.generator.num_running == 2)
        stop.set()
        await until(actor.done)
    handed_back = house.admission.outcomes(pb.GROUP_OUTCOME_HANDED_BACK)
    assert sorted(event.lease_id for event in handed_back) == ["lease-0", "lease-1"]
    await until(lambda: house.generator.num_running == 0)


async def test_a_stop_hands_back_groups_that_have_not_even_begun(house: House) -> None:
    house.admission.to_grant = 1
    wiring = _wiring(house, {"path": "house_tasks:Together"}, {"drainSeconds": 0})
    stop = asyncio.Event()
    house.admission.on_grant = stop.set
    async with asyncio.timeout(20):
        await run_actor(wiring, stop)
    assert [event.lease_id for event in house.admission.outcomes(pb.GROUP_OUTCOME_HANDED_BACK)] == ["lease-0"]


async def test_groups_that_all_fail_are_taken_ever_more_slowly(house: House) -> None:
    house.admission.to_grant = 10_000
    async with acting(house, "BrokenPrompt", actors={"generator": {"maxRunningRequests": 4}}) as (actor, _):
        await alive(actor, lambda: len(house.failures()) >= 18)
        granted = house.admission.num_granted
        with pytest.raises(TimeoutError):
            await until(lambda: house.admission.num_granted > granted + 20, timeout_s=1.0)


async def test_leases_are_renewed_in_one_session_while_groups_run(house: House) -> None:
    house.admission.to_grant = 1
    house.generator.answer = house.generator.hang
    async with acting(house, "Together") as (actor, _):
        await alive(actor, lambda: sum("lease-0" in request.running_lease_ids for request in house.admission.requests) >= 2)
    assert len({request.session_id for request in house.admission.requests}) == 1
    assert {request.actor_id for request in house.admission.requests} == {"actor-0"}


async def _process(house: House, *flags: str) -> asyncio.subprocess.Process:
    wiring = _wiring(house, {"path": "house_tasks:Together"}, {"drainSeconds": 0.1})
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "pipelinerl_actor.rollout", "--job", str(wiring.job_file), "--output", str(house.folder)),
        *("--nats-url", house.nats.url, "--preprocessor", house.preprocessor, *flags),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(house.folder)},
    )


async def test_sigterm_hands_back_and_ends_the_process_with_0(house: House) -> None:
    house.admission.to_grant = 1
    house.generator.answer = house.generator.hang
    process = await _process(house, "--generator", house.generator.url)
    try:
        await until(lambda: house.generator.num_running == 1)
        process.terminate()
        async with asyncio.timeout(20):
            _, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        assert len(house.admission.outcomes(pb.GROUP_OUTCOME_HANDED_BACK)) == 1
        await until(lambda: house.generator.num_running == 0)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_process_with_wrong_wiring_ends_with_2_and_says_why(house: House) -> None:
    process = await _process(house)
    async with asyncio.timeout(30):
        _, errors = await process.communicate()
    assert process.returncode == 2
    assert b"--generator is missing" in errors


async def test_a_preprocessor_that_is_away_is_waited_for_and_nothing_is_lost(house: House) -> None:
    house.preprocessor = f"127.0.0.1:{_free_port()}"
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
    fake, port = FakeGenerator(), _free_port()
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


async def test_an_actor_whose_generator_serves_nothing_ends_when_it_is_asked_to(house: House) -> None:
    wiring = _wiring(house, {"path": "house_tasks:Together"}, {}, [f"http://127.0.0.1:{_free_port()}"])
    stop = asyncio.Event()
    stop.set()
    async with asyncio.timeout(20):
        await run_actor(wiring, stop)
    assert house.admission.num_granted == 0


async def test_a_generator_that_is_away_is_waited_for_and_gets_no_more_groups(house: House) -> None:
    house.generator.answer = house.generator.status(503, Retry_After="0.05")
    house.admission.to_grant = 1
    async with acting(house, "Together") as (actor, _):
        await alive(actor, lambda: house.metrics and house.last_metric("rollout_errors_total{reason=generator_away}") >= 2)
        house.generator.is_ready = False
        await alive(actor, lambda: house.admission.requests[-1].max_groups == 0)
        house.admission.to_grant = 5
        await alive(actor, lambda: len(house.metrics) >= 4)
        assert house.admission.num_granted == 1
        house.generator.is_ready = True
        house.generator.answer = house.generator.say
        await alive(actor, lambda: len(house.groups) == 6)


async def test_a_generator_that_hangs_does_not_hold_back_the_news_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator_client, "_READY_S", 600.0)
    fake = FakeGenerator()
    fake.is_ready = False
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hanging = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with fake.serving(), aiohttp.ClientSession() as session:
            clients = [GeneratorClient(url, session, None) for url in (hanging, fake.url)]
            generators = Generators(clients, max_running=8, max_retries=0, meter=Meter(Metrics(ACTOR, JOB)))
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
    dead = f"http://127.0.0.1:{_free_port()}"
    async with second.serving():
        house.admission.to_grant = 4
        urls = [dead, house.generator.url, second.url]
        async with acting(house, "Together", generators=urls) as (actor, _):
            await alive(actor, lambda: house.generator.num_running == 2 and second.num_running == 2)


async def test_metrics_tell_tokens_samples_and_groups(house: House) -> None:
    house.admission.to_grant = 3
    async with acting(house, "Together", actors={"generator": {"maxRunningRequests": 8}}) as (actor, _):
        await alive(actor, lambda: house.metrics and house.last_metric("groups_published_total") == 3)
    record = house.metrics[-1]
    assert (record.role, record.instance, record.job, record.step) == ("actor", "actor-0", JOB, -1)
    assert record.values["tokens_generated_total"] == 3 * 4 * 2
    assert record.values["samples_generated_total"] == 12
    assert record.values["memory_bytes"] > 1 << 20
    assert (record.values["completion_tokens_count"], record.values["completion_tokens_sum"]) == (12, 24)
    assert record.values["group_seconds_count"] == 3
    assert record.values["verification_seconds_count"] == 12
    assert house.metrics[0].values["requests_limit"] == 8
    assert (record.values["requests_limit"], record.values["generation_tokens_per_second"]) == (0, 0), "it has ended"


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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_the_generators_load_is_told_to_the_preprocessor(house: House) -> None:
    house.generator.answer = house.generator.hang
    house.admission.to_grant = 1
    async with acting(house, "Together", generators=[house.generator.url, "http://127.0.0.1:9"]) as (actor, _):
        await alive(actor, lambda: any(load.num_running == 4 for load in house.admission.loads))
        house.admission.to_cancel = ["lease-0"]
        await alive(actor, lambda: house.generator.num_running == 0)
    load = house.admission.loads[0]
    assert (load.generator, load.kv_usage, load.kv_tokens, load.steps_total) == (house.generator.url, 0.25, 64, 3)
    assert {load.generator for load in house.admission.loads} == {house.generator.url}
    asked = [load.requested_seconds_total for load in house.admission.loads]
    assert asked == sorted(asked)
    assert asked[-1] > asked[0]


def partial_of(event: pb.GroupEvent) -> dict[int, tuple[list[int], list[tuple[int, int]]]]:
    """Tokens and version runs by sample index."""
    return {
        answer.sample_index: (list(answer.token_ids), [(run.policy_version, run.num_tokens) for run in answer.version_runs])
        for answer in event.partial.answers
    }


@pytest.mark.parametrize("max_tokens", [8, 300], ids=["in one request", "each alone"])
async def test_a_recalled_group_brings_what_it_has_sampled(house: House, max_tokens: int) -> None:
    house.generator.answer = house.generator.linger
    house.admission.to_grant = 1
    async with acting(house, "Together", model_len=512, sampling={"maxTokens": max_tokens}) as (actor, _):
        await alive(actor, lambda: house.generator.num_sequences == 4)
        house.admission.to_recall = ["lease-0"]
        await alive(actor, lambda: house.admission.outcomes(pb.GROUP_OUTCOME_CANCELLED))
    (event,) = house.admission.outcomes(pb.GROUP_OUTCOME_CANCELLED)
    halves = ([97, 98], [(1, 1), (2, 1)])
    first = ([55, 2], [(1, 2)]) if max_tokens == 8 else halves
    assert partial_of(event) == {0: first, 1: halves, 2: halves, 3: halves}
    assert [answer.finish_reason for answer in event.partial.answers] == [1 if max_tokens == 8 else 0, 0, 0, 0]
    assert list(event.partial.answers[1].logprobs) == [-0.5, -0.25]
    assert list(event.partial.prompt_token_ids) == [4, 9, 2, 5]
    assert event.tokens_wasted == 0
    assert house.groups == []


async def test_a_group_goes_on_from_what_an_earlier_attempt_has_sampled(house: House) -> None:
    """Of four trajectories one is complete, two are half done, one was never begun."""
    runs = [sample_pb2.VersionRun(policy_version=1, num_tokens=1), sample_pb2.VersionRun(policy_version=2, num_tokens=1)]
    half: dict[str, Any] = {"token_ids": [97, 98], "logprobs": [-0.5, -0.25], "version_runs": runs}
    answers = [
        pb.PartialAnswer(sample_index=0, finish_reason=sample_pb2.FINISH_REASON_STOP, text="7", **half),
        pb.PartialAnswer(sample_index=1, **half),
        pb.PartialAnswer(sample_index=3, **half),
    ]
    house.admission.partial = pb.PartialGroup(prompt_token_ids=[4, 9, 2, 5], answers=answers)
    house.admission.to_grant = 1

    async def say(body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(completion(["7"] * body["n"], prompt=[4, 9, 2, 5], version=2))

    house.generator.answer = say
    async with acting(house, "Together") as (actor, _):
        await alive(actor, lambda: house.groups)
    asked = sorted((body.get("answer_token_ids", []), body["max_tokens"]) for body in house.generator.requests)
    assert asked == [([], 8), ([97, 98], 6), ([97, 98], 6)]
    tokens = [[int(token) for token in sample.token_ids_S] for sample in house.groups[0].samples]
    prompt = [4, 9, 2, 5]
    whole = [*prompt, 97, 98, 55, 2]
    assert tokens == [[*prompt, 97, 98], whole, [*prompt, 55, 2], whole]
    joined = house.groups[0].samples[1]
    assert [(run.policy_version, run.num_tokens) for run in joined.version_runs] == [(1, 1), (2, 3)]
    assert joined.logprobs_T.tolist() == [-0.5, -0.25, -0.5, -0.5]
    assert [sample.reward for sample in house.groups[0].samples] == [1.0] * 4
    (started,) = house.admission.outcomes(pb.GROUP_OUTCOME_STARTED)
    assert started.served_version == 1  # what the policy must count from


async def test_a_stop_hands_back_what_running_groups_have_sampled(house: House) -> None:
    house.generator.answer = house.generator.linger
    house.admission.to_grant = 2
    async with acting(house, "Together", actors={"drainSeconds": 0}) as (actor, stop):
        await alive(actor, lambda: house.generator.num_sequences == 8)
        stop.set()
        await alive(actor, lambda: len(house.admission.outcomes(pb.GROUP_OUTCOME_HANDED_BACK)) == 2)
    events = house.admission.outcomes(pb.GROUP_OUTCOME_HANDED_BACK)
    assert sorted(event.lease_id for event in events) == ["lease-0", "lease-1"]
    assert all(len(event.partial.answers) == 4 for event in events)


async def test_a_task_with_stop_strings_begins_again(house: House) -> None:
    house.generator.answer = house.generator.hang
    house.admission.to_grant = 1
    async with acting(house, "Together", sampling={"maxTokens": 8, "stop": ["."]}) as (actor, _):
        await alive(actor, lambda: house.generator.num_sequences == 4)
        house.admission.to_recall = ["lease-0"]
        await alive(actor, lambda: house.admission.outcomes(pb.GROUP_OUTCOME_CANCELLED))
    (event,) = house.admission.outcomes(pb.GROUP_OUTCOME_CANCELLED)
    assert not event.HasField("partial")


@pytest.mark.parametrize("task", ["Together", "Alone"])
async def test_no_more_trajectories_decode_than_the_policy_lets(house: House, task: str) -> None:
    house.admission.max_trajectories = 3
    house.admission.to_grant = 3
    async with acting(house, task) as (actor, _):
        await alive(actor, lambda: len(house.groups) == 3)
    assert house.generator.most_sequences <= 3
    assert max(request.max_groups for request in house.admission.requests[1:]) == 1  # four trajectories are one group
