"""The rollout loop against a real nats-server, real gRPC and a generator over real HTTP."""

from typing import Any

import pytest
from actor_fakes import answer_of, choice
from actor_harness import JOB, ActorHarness, acting, alive
from aiohttp import web

from pipelinerl.v1 import admission_pb2 as pb
from pipelinerl_common.types import FinishReason, VersionRun


async def test_leased_groups_are_sampled_verified_and_published_once(harness: ActorHarness) -> None:
    harness.admission.to_grant = 3
    async with acting(harness, "Together") as (actor, _):
        await alive(actor, lambda: len(harness.groups) == 3)
    by_id = {group.group_id: group for group in harness.groups}
    assert sorted(by_id) == ["0-0", "0-1", "0-2"]
    group = by_id["0-1"]  # type: ignore[index]
    assert (group.job, group.attempt, group.prompt_index, group.temperature) == (JOB, 1, 1, 1.0)
    assert [sample.index for sample in group.samples] == [0, 1, 2, 3]
    sample = group.samples[2]
    assert sample.token_ids_S.tolist() == [4, 9, 2, 5, ord("7"), 2]
    assert sample.segment_lengths == (4, 2)
    assert sample.logprobs_T.tolist() == [-0.5, -0.5]
    assert sample.version_runs == (VersionRun(0, 2),)
    assert (sample.reward, sample.metrics, sample.finish_reason) == (
        1.0,
        {"success": 1.0},
        FinishReason.STOP,
    )
    started = harness.admission.outcomes(pb.GROUP_OUTCOME_STARTED)
    assert sorted(event.lease_id for event in started) == ["lease-0", "lease-1", "lease-2"]
    assert {event.served_version for event in started} == {3}
    assert not harness.failures()


async def test_a_single_turn_group_of_short_completions_is_one_request(
    harness: ActorHarness,
) -> None:
    harness.admission.to_grant = 1
    async with acting(harness, "Together") as (actor, _):
        await alive(actor, lambda: harness.groups)
    assert [request["n"] for request in harness.generator.requests] == [4]


async def test_a_task_with_its_own_rollout_and_long_completions_are_a_request_each(
    harness: ActorHarness,
) -> None:
    harness.admission.to_grant = 1
    async with acting(harness, "Alone") as (actor, _):
        await alive(actor, lambda: harness.groups)
    assert [request["n"] for request in harness.generator.requests] == [1] * 4


async def test_a_group_larger_than_the_slots_is_split_into_requests_that_fit(
    harness: ActorHarness,
) -> None:
    harness.admission.to_grant = 1
    async with acting(harness, "Together", actors={"generator": {"maxRunningRequests": 3}}) as (
        actor,
        _,
    ):
        await alive(actor, lambda: harness.groups)
    assert [request["n"] for request in harness.generator.requests] == [3, 1]
    assert len(harness.groups[0].samples) == 4


async def test_a_task_may_be_a_function(harness: ActorHarness) -> None:
    harness.admission.to_grant = 1
    async with acting(harness, "function", args={"right": "7"}) as (actor, _):
        await alive(actor, lambda: harness.groups)
    assert [sample.reward for sample in harness.groups[0].samples] == [1.0, 2.0, 3.0, 4.0]
    assert harness.generator.requests[0]["messages"] == [{"role": "user", "content": "0 0"}]


async def test_no_more_sequences_run_than_the_generator_has_slots(harness: ActorHarness) -> None:
    harness.admission.to_grant = 30
    async with acting(harness, "Together", actors={"generator": {"maxRunningRequests": 8}}) as (
        actor,
        _,
    ):
        await alive(actor, lambda: len(harness.groups) == 30)
    assert harness.generator.most_sequences <= 8


async def test_only_as_many_groups_are_leased_as_keep_the_slots_busy(harness: ActorHarness) -> None:
    harness.admission.to_grant = 1000
    harness.generator.answer = harness.generator.hang
    async with acting(harness, "Together", actors={"generator": {"maxRunningRequests": 8}}) as (
        actor,
        _,
    ):
        await alive(actor, lambda: harness.generator.num_running == 2)
        await alive(
            actor, lambda: any(request.max_groups == 0 for request in harness.admission.requests)
        )
        assert harness.admission.num_granted == 3  # two fill 8 slots, one waits
        assert sorted(harness.admission.requests[-1].running_lease_ids) == [
            "lease-0",
            "lease-1",
            "lease-2",
        ]


async def test_a_cancelled_lease_closes_its_request_and_is_reported(harness: ActorHarness) -> None:
    harness.admission.to_grant = 2
    harness.generator.answer = harness.generator.hang
    async with acting(harness, "Together") as (actor, _):
        await alive(actor, lambda: harness.generator.num_running == 2)
        harness.admission.to_cancel = ["lease-1"]
        await alive(actor, lambda: harness.generator.num_running == 1)
        await alive(actor, lambda: harness.admission.outcomes(pb.GROUP_OUTCOME_CANCELLED))
    assert harness.admission.outcomes(pb.GROUP_OUTCOME_CANCELLED)[0].lease_id == "lease-1"
    assert not harness.groups


async def test_an_unknown_cancelled_lease_is_ignored(harness: ActorHarness) -> None:
    harness.admission.to_grant = 1
    harness.admission.to_cancel = ["lease-of-an-older-session"]
    async with acting(harness, "Together") as (actor, _):
        await alive(actor, lambda: harness.groups)


async def test_an_empty_completion_is_a_sample_like_any_other(harness: ActorHarness) -> None:
    async def answer(body: dict[str, Any]) -> web.StreamResponse:
        texts = ["", "7", "7", "7"]
        choices = [choice(index, text) for index, text in enumerate(texts)]
        choices[1] |= {
            "token_ids": [],
            "token_logprobs": [],
            "weight_versions": [],
            "message": {"content": None},
        }
        return web.json_response(answer_of(choices, [4, 5]))

    harness.generator.answer = answer
    harness.admission.to_grant = 1
    async with acting(harness, "Together") as (actor, _):
        await alive(actor, lambda: harness.groups)
    assert [(sample.num_sampled, sample.reward) for sample in harness.groups[0].samples] == [
        (1, 0.0),
        (0, 0.0),
        (2, 1.0),
        (2, 1.0),
    ]


async def test_leases_are_renewed_in_one_session_while_groups_run(harness: ActorHarness) -> None:
    harness.admission.to_grant = 1
    harness.generator.answer = harness.generator.hang
    async with acting(harness, "Together") as (actor, _):
        await alive(
            actor,
            lambda: (
                sum(
                    "lease-0" in request.running_lease_ids for request in harness.admission.requests
                )
                >= 2
            ),
        )
    assert len({request.session_id for request in harness.admission.requests}) == 1
    assert {request.actor_id for request in harness.admission.requests} == {"actor-0"}


async def test_metrics_tell_tokens_samples_and_groups(harness: ActorHarness) -> None:
    harness.admission.to_grant = 3
    async with acting(harness, "Together", actors={"generator": {"maxRunningRequests": 8}}) as (
        actor,
        _,
    ):
        await alive(
            actor, lambda: harness.metrics and harness.last_metric("groups_published_total") == 3
        )
    record = harness.metrics[-1]
    assert (record.role, record.instance, record.job, record.step) == ("actor", "actor-0", JOB, -1)
    assert record.values["tokens_generated_total"] == 3 * 4 * 2
    assert record.values["samples_generated_total"] == 12
    assert record.values["memory_bytes"] > 1 << 20
    assert (record.values["completion_tokens_count"], record.values["completion_tokens_sum"]) == (
        12,
        24,
    )
    assert record.values["group_seconds_count"] == 3
    assert record.values["verification_seconds_count"] == 12
    assert harness.metrics[0].values["requests_limit"] == 8
    assert (record.values["requests_limit"], record.values["generation_tokens_per_second"]) == (
        0,
        0,
    ), "it has ended"


@pytest.mark.parametrize("task", ["Together", "Alone"])
async def test_no_more_trajectories_decode_than_the_policy_lets(
    harness: ActorHarness, task: str
) -> None:
    harness.admission.max_trajectories = 3
    harness.admission.to_grant = 3
    async with acting(harness, task) as (actor, _):
        await alive(actor, lambda: len(harness.groups) == 3)
    assert harness.generator.most_sequences <= 3
    assert (
        max(request.max_groups for request in harness.admission.requests[1:]) == 1
    )  # four trajectories are one group
