"""What goes wrong with a task or a trajectory: it is tried again, counted and given up, or ends the
actor.
"""

import asyncio
import re
from typing import Any

import pytest
from actor_fakes import answer_of, choice, until
from actor_harness import ActorHarness, acting, alive, wiring_of
from aiohttp import web

from pipelinerl.v1 import admission_pb2 as pb
from pipelinerl_actor.rollout.failures import FirstSuccessGuard
from pipelinerl_actor.rollout.start import run_actor
from pipelinerl_common.errors import SettingsError


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
async def test_a_broken_task_fails_its_group_with_a_reason_and_the_actor_goes_on(
    harness: ActorHarness, task: str, reason: str
) -> None:
    harness.admission.to_grant = 2
    async with acting(harness, task, verifierTimeoutSeconds=0.2) as (actor, _):
        await alive(actor, lambda: len(harness.failures()) == 2)
        assert not actor.done()
        await alive(
            actor, lambda: harness.metrics and harness.last_metric("groups_failed_total") == 2
        )
        assert harness.last_metric(f"rollout_errors_total{{reason={reason}}}") >= 2
    assert {reason for _, reason in harness.failures()} == {reason}
    assert not harness.groups


async def test_a_verifier_that_blocks_for_ever_does_not_hold_up_other_groups(
    harness: ActorHarness,
) -> None:
    harness.admission.to_grant = 3
    async with acting(harness, "HangsHard", verifierTimeoutSeconds=3.0) as (actor, _):
        await alive(actor, lambda: len(harness.groups) == 2 and harness.failures())
    assert harness.failures() == [("lease-0", "verifier_timeout")]
    assert sorted(group.prompt_index for group in harness.groups) == [1, 2]


async def test_a_group_is_published_without_its_failed_part_when_the_job_allows_it(
    harness: ActorHarness,
) -> None:
    harness.admission.to_grant = 1
    async with acting(harness, "OneNotANumber", minGroupFraction=0.75) as (actor, _):
        await alive(actor, lambda: harness.groups)
    assert [sample.index for sample in harness.groups[0].samples] == [0, 2, 3]


async def test_an_environment_that_is_away_for_a_moment_is_tried_again(
    harness: ActorHarness,
) -> None:
    harness.admission.to_grant = 1
    async with acting(harness, "ShakyEnvironment") as (actor, _):
        await alive(actor, lambda: harness.groups)
    assert len(harness.groups[0].samples) == 4


async def test_a_prompt_longer_than_the_context_fails_its_group_only(harness: ActorHarness) -> None:
    harness.generator.script.append(
        harness.generator.status(
            400, "prompt of 90 tokens and max_tokens=8 exceed the context of 64"
        )
    )
    harness.admission.to_grant = 2
    async with acting(harness, "Together", actors={"generator": {"maxRunningRequests": 4}}) as (
        actor,
        _,
    ):
        await alive(actor, lambda: harness.groups and harness.failures())
    failed = harness.admission.outcomes(pb.GROUP_OUTCOME_FAILED)
    assert [event.reason for event in failed] == ["http_400"]
    assert "context of 64" in failed[0].detail


async def test_an_actor_of_which_nothing_succeeds_ends_with_the_reason_as_wrong_settings(
    harness: ActorHarness,
) -> None:
    harness.generator.answer = harness.generator.status(
        400, "prompt of 90 tokens and max_tokens=8 exceed the context of 64"
    )
    harness.admission.to_grant = 1000
    with pytest.raises(ExceptionGroup) as ended:
        async with asyncio.timeout(60):
            await run_actor(
                wiring_of(harness, {"path": "harness_tasks:Together"}, {}), asyncio.Event()
            )
    unexpected = ended.value.split(SettingsError)[1]
    assert unexpected is None
    assert re.search(
        r"64 prompts failed for the same reason: http_400: .*exceed the context of 64; "
        r"model\.maxModelLen must hold",
        str(ended.value.exceptions[0]),
    )
    assert len(harness.failures()) < 200
    await until(
        lambda: (
            harness.metrics
            and harness.last_metric("rollout_errors_total{reason=http_400}") >= 4 * 64
        )
    )


def test_nothing_ends_where_something_succeeded_or_the_reason_changes_or_may_pass() -> None:
    def fail(beginning: FirstSuccessGuard, reason: str, prompts: range) -> None:
        for prompt in prompts:
            beginning.failed(prompt, reason, "why")

    beginning = FirstSuccessGuard()
    fail(beginning, "http_400", range(63))
    fail(beginning, "http_400", range(63))  # the same prompts once more
    fail(beginning, "timeout", range(1000))
    fail(beginning, "http_400", range(63))
    beginning.serves(1)  # other actors' groups were trained
    fail(beginning, "http_400", range(63))
    beginning.serves(1)
    with pytest.raises(
        SettingsError, match="64 prompts failed for the same reason: http_400: why; model"
    ):
        beginning.failed(63, "http_400", "why")
    beginning.succeeded()
    fail(beginning, "http_400", range(1000))
    fail(FirstSuccessGuard(), "verifier_unavailable", range(1000))


async def test_a_group_without_any_sampled_token_fails(harness: ActorHarness) -> None:
    async def answer(body: dict[str, Any]) -> web.StreamResponse:
        empty: dict[str, Any] = {"token_ids": [], "token_logprobs": [], "weight_versions": []}
        return web.json_response(answer_of([choice(i, "", **empty) for i in range(4)], [4, 5]))

    harness.generator.answer = answer
    harness.admission.to_grant = 1
    async with acting(harness, "Together") as (actor, _):
        await alive(actor, harness.failures)
    assert harness.failures() == [("lease-0", "no_tokens")]


async def test_a_generator_that_always_breaks_fails_the_group_after_bounded_tries(
    harness: ActorHarness,
) -> None:
    harness.generator.answer = harness.generator.status(500, "the engine is broken")
    harness.admission.to_grant = 1
    async with acting(harness, "Together") as (actor, _):
        await alive(actor, harness.failures)
    assert harness.failures() == [("lease-0", "generator_error")]
    assert len(harness.generator.requests) == 3


async def test_a_trajectory_that_takes_too_long_is_given_up_and_its_decoding_stopped(
    harness: ActorHarness,
) -> None:
    harness.generator.answer = harness.generator.hang
    harness.admission.to_grant = 1
    async with acting(harness, "Together", timeoutSeconds=0.3) as (actor, _):
        await alive(actor, harness.failures)
    assert harness.failures() == [("lease-0", "timeout")]
    await until(lambda: harness.generator.num_running == 0)


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("harness_tasks:Missing", "has no 'Missing'"),
        ("no_such_module:Task", "no module 'no_such_module'"),
    ],
)
async def test_a_task_that_cannot_be_loaded_ends_the_actor(
    harness: ActorHarness, path: str, complaint: str
) -> None:
    with pytest.raises(SettingsError, match=complaint):
        await run_actor(wiring_of(harness, {"path": path}, {}), asyncio.Event())


async def test_groups_that_all_fail_are_taken_ever_more_slowly(harness: ActorHarness) -> None:
    harness.admission.to_grant = 10_000
    async with acting(harness, "BrokenPrompt", actors={"generator": {"maxRunningRequests": 4}}) as (
        actor,
        _,
    ):
        await alive(actor, lambda: len(harness.failures()) >= 18)
        granted = harness.admission.num_granted
        with pytest.raises(TimeoutError):
            await until(lambda: harness.admission.num_granted > granted + 20, timeout_s=1.0)
