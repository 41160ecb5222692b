"""Groups that are stopped half done, and resume in another attempt from what they have sampled."""

from typing import Any

import pytest
from actor_fakes import completion
from actor_harness import ActorHarness, acting, alive
from aiohttp import web

from pipelinerl.v1 import admission_pb2 as pb
from pipelinerl.v1 import sample_pb2


def partial_of(event: pb.GroupEvent) -> dict[int, tuple[list[int], list[tuple[int, int]]]]:
    """Tokens and version runs by sample index."""
    return {
        answer.sample_index: (
            list(answer.token_ids),
            [(run.policy_version, run.num_tokens) for run in answer.version_runs],
        )
        for answer in event.partial.answers
    }


async def test_a_group_goes_on_from_what_an_earlier_attempt_has_sampled(
    harness: ActorHarness,
) -> None:
    """One trajectory of four is complete, two are half done, one has not begun."""
    runs = [
        sample_pb2.VersionRun(policy_version=1, num_tokens=1),
        sample_pb2.VersionRun(policy_version=2, num_tokens=1),
    ]
    half: dict[str, Any] = {"token_ids": [97, 98], "logprobs": [-0.5, -0.25], "version_runs": runs}
    answers = [
        pb.PartialAnswer(
            sample_index=0, finish_reason=sample_pb2.FINISH_REASON_STOP, text="7", **half
        ),
        pb.PartialAnswer(sample_index=1, **half),
        pb.PartialAnswer(sample_index=3, **half),
    ]
    harness.admission.partial = pb.PartialGroup(prompt_token_ids=[4, 9, 2, 5], answers=answers)
    harness.admission.to_grant = 1

    async def say(body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(completion(["7"] * body["n"], prompt=[4, 9, 2, 5], version=2))

    harness.generator.answer = say
    async with acting(harness, "Together") as (actor, _):
        await alive(actor, lambda: harness.groups)
    asked = sorted(
        (body.get("answer_token_ids", []), body["max_tokens"])
        for body in harness.generator.requests
    )
    assert asked == [([], 8), ([97, 98], 6), ([97, 98], 6)]
    tokens = [[int(token) for token in sample.token_ids_S] for sample in harness.groups[0].samples]
    prompt = [4, 9, 2, 5]
    whole = [*prompt, 97, 98, 55, 2]
    assert tokens == [[*prompt, 97, 98], whole, [*prompt, 55, 2], whole]
    joined = harness.groups[0].samples[1]
    assert [(run.policy_version, run.num_tokens) for run in joined.version_runs] == [(1, 1), (2, 3)]
    assert joined.logprobs_T.tolist() == [-0.5, -0.25, -0.5, -0.5]
    assert [sample.reward for sample in harness.groups[0].samples] == [1.0] * 4
    (started,) = harness.admission.outcomes(pb.GROUP_OUTCOME_STARTED)
    assert started.served_version == 1  # what the policy must count from


@pytest.mark.parametrize("max_tokens", [8, 300], ids=["in one request", "each alone"])
async def test_a_stop_hands_back_what_running_groups_have_sampled(
    harness: ActorHarness, max_tokens: int
) -> None:
    harness.generator.answer = harness.generator.linger
    harness.admission.to_grant = 2
    async with acting(
        harness,
        "Together",
        actors={"drainSeconds": 0},
        model_len=512,
        sampling={"maxTokens": max_tokens},
    ) as (actor, stop):
        await alive(actor, lambda: harness.generator.num_sequences == 8)
        stop.set()
        await alive(
            actor, lambda: len(harness.admission.outcomes(pb.GROUP_OUTCOME_HANDED_BACK)) == 2
        )
    events = harness.admission.outcomes(pb.GROUP_OUTCOME_HANDED_BACK)
    assert sorted(event.lease_id for event in events) == ["lease-0", "lease-1"]
    halves = ([97, 98], [(1, 1), (2, 1)])
    first = ([55, 2], [(1, 2)]) if max_tokens == 8 else halves
    for event in events:
        assert partial_of(event) == {0: first, 1: halves, 2: halves, 3: halves}
        reasons = [answer.finish_reason for answer in event.partial.answers]
        assert reasons == [1 if max_tokens == 8 else 0, 0, 0, 0]
        assert list(event.partial.answers[1].logprobs) == [-0.5, -0.25]
        assert list(event.partial.prompt_token_ids) == [4, 9, 2, 5]
        assert event.tokens_wasted == 0
    assert harness.groups == []


async def test_a_task_with_stop_strings_begins_again(harness: ActorHarness) -> None:
    harness.generator.answer = harness.generator.hang
    harness.admission.to_grant = 1
    async with acting(
        harness, "Together", actors={"drainSeconds": 0}, sampling={"maxTokens": 8, "stop": ["."]}
    ) as (actor, stop):
        await alive(actor, lambda: harness.generator.num_sequences == 4)
        stop.set()
        await alive(actor, lambda: harness.admission.outcomes(pb.GROUP_OUTCOME_HANDED_BACK))
    (event,) = harness.admission.outcomes(pb.GROUP_OUTCOME_HANDED_BACK)
    assert not event.HasField("partial")
