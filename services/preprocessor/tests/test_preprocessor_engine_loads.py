"""The load reports that the policy receives, by hand and live."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from preprocessor_harness import DEADLINE_S, PreprocessorHarness, harness

from pipelinerl.v1 import admission_pb2 as pb
from pipelinerl.v1 import sample_pb2
from pipelinerl.v1.admission_pb2_grpc import AdmissionStub
from pipelinerl_cli.__main__ import main
from pipelinerl_common.errors import PermanentError
from pipelinerl_common.rpc import call
from pipelinerl_preprocessor.metrics import EngineLoads
from pipelinerl_staleness.policy import EngineLoad


def load(generator: str = "a", **fields: Any) -> pb.GeneratorLoad:
    return pb.GeneratorLoad(generator=generator, **fields)


def test_the_fullest_generator_counts_and_what_waits_is_summed() -> None:
    loads = EngineLoads()
    assert loads.observation(0.0, 5.0) == EngineLoad(None, 0, 0, 5.0)
    assert loads.values(0.0) == []
    loads.add("actor-0", load(kv_usage=0.25, num_waiting=2, kv_tokens=160, num_running=7), 1.0)
    loads.add("actor-1", load(kv_usage=0.75, num_waiting=3, kv_tokens=320, num_running=1), 1.0)
    assert loads.observation(2.0, 5.0) == EngineLoad(0.75, 5, 0, 5.0)
    assert loads.values(2.0) == [2, 480, 0, 0.75, 8, 5, *[0.0] * 9]
    assert loads.observation(17.0, 5.0) == EngineLoad(
        None, 0, 0, 5.0
    )  # neither has reported for 15 s
    assert (loads.kv_usage(17.0), loads.num_waiting(17.0)) == (None, None)


def test_an_engine_without_blocks_lets_nothing_grow() -> None:
    loads = EngineLoads()
    loads.add("actor-0", load(num_waiting=1), 0.0)
    assert loads.observation(0.0, 5.0) == EngineLoad(None, 1, 0, 5.0)


def test_totals_are_what_is_new_and_survive_a_restart_of_the_generator() -> None:
    loads = EngineLoads()
    loads.add("actor-0", load(preemptions_total=5, steps_total=100, step_seconds_total=1.0), 0.0)
    assert loads.observation(0.0, 5.0).num_preemptions == 0  # they were before the first report
    loads.add("actor-0", load(preemptions_total=7, steps_total=150, step_seconds_total=1.5), 1.0)
    loads.add(
        "actor-0", load(preemptions_total=1, steps_total=10, step_seconds_total=0.1), 2.0
    )  # a new process
    loads.add("actor-0", load(preemptions_total=4, steps_total=30, step_seconds_total=0.3), 3.0)
    assert loads.observation(3.0, 5.0).num_preemptions == 2 + 3
    assert loads.observation(3.0, 5.0).num_preemptions == 0
    preemptions, steps, step_seconds, *_ = loads.values(3.0)[6:]
    assert (preemptions, steps) == (5, 50 + 20)
    assert step_seconds == pytest.approx(0.5 + 0.2)


async def report(preprocessor: PreprocessorHarness, *loads: pb.GeneratorLoad) -> None:
    request = pb.ReportRequest(actor_id="actor-0", loads=loads)
    await call(AdmissionStub(preprocessor.channel).Report, request, timeout_s=DEADLINE_S)


def events(preprocessor: PreprocessorHarness, method: str) -> list[list[Any]]:
    lines = (preprocessor.output / "events.jsonl").read_text().splitlines(keepends=True)
    read = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in read if event[1] == method]


@pytest.mark.parametrize(
    "policy",
    [{"policy": "slack", "eta": 3}, {"policy": "prime_rl", "eta": 3, "initialInflight": 4}],
    ids=["slack", "prime_rl"],
)
async def test_nearly_empty_engines_let_the_adaptive_policies_admit_more(
    tmp_path: Path, policy: dict[str, Any]
) -> None:
    """SLACK begins at one and a half batches of 2 groups and grows by a group with a report;
    prime-rl's cap of 4 trajectories grows while groups of 2 finish. The run then replays to the
    same decisions, the load reports included.
    """
    async with harness(tmp_path, staleness=policy) as preprocessor:
        await preprocessor.begin()
        held = list((await preprocessor.lease(9)).leases)
        most = len(held)
        async with asyncio.timeout(DEADLINE_S):
            while len(held) <= most:
                await report(preprocessor, load(kv_usage=0.05, kv_tokens=1600, num_running=4))
                if (
                    policy["policy"] == "prime_rl"
                    and len(held) == most
                    and events(preprocessor, "observe")
                ):
                    await preprocessor.publish(held.pop(0))
                running = [lease.lease_id for lease in held]
                held += (await preprocessor.lease(9, running=running, wait_s=0.3)).leases
        assert [0.05, 0, 0, 5.0] in [event[2][0] for event in events(preprocessor, "observe")]
        note = events(preprocessor, "load")[0]
        assert note[2][:6] == [1, 1600, 0, 0.05, 4, 0]
    assert main(["replay", str(preprocessor.output)]) == 0


async def test_a_report_of_too_many_generators_is_refused(tmp_path: Path) -> None:
    async with harness(tmp_path) as preprocessor:
        await preprocessor.begin()
        with pytest.raises(PermanentError, match="loads has 257 generators: at most 256"):
            await report(preprocessor, *[load(f"g{number}") for number in range(257)])


# Stopped groups and limits, over the wire


def partial(*tokens: int) -> pb.PartialGroup:
    runs = [sample_pb2.VersionRun(policy_version=0, num_tokens=len(tokens))]
    answer = pb.PartialAnswer(
        sample_index=0, token_ids=tokens, logprobs=[-0.5] * len(tokens), version_runs=runs
    )
    return pb.PartialGroup(prompt_token_ids=[4, 2], answers=[answer])


async def test_a_group_that_one_actor_hands_back_is_granted_to_another_with_its_tokens(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as preprocessor:
        await preprocessor.begin()
        (lease,) = (await preprocessor.lease(1)).leases
        assert not lease.HasField("partial")
        await preprocessor.report(
            lease.lease_id, pb.GROUP_OUTCOME_HANDED_BACK, partial=partial(7, 8, 9)
        )
        (again,) = (await preprocessor.lease(1, actor="actor-1")).leases
        assert (again.group_id, again.attempt, again.partial) == (
            lease.group_id,
            1,
            partial(7, 8, 9),
        )
        await preprocessor.publish(again)
        await preprocessor.metric("queue_groups{stage=ready}", 1)


async def test_the_policy_s_limit_of_trajectories_reaches_the_actors(tmp_path: Path) -> None:
    """prime-rl begins with a cap of 5: three for the first actor, two for the second. areal has no
    limit.
    """
    async with harness(
        tmp_path, staleness={"policy": "prime_rl", "eta": 2, "initialInflight": 5}
    ) as preprocessor:
        await preprocessor.begin()
        assert (await preprocessor.lease(0)).max_trajectories == 5
        assert (await preprocessor.lease(0, actor="actor-1")).max_trajectories == 2
        assert (await preprocessor.lease(0)).max_trajectories == 3
    (tmp_path / "areal").mkdir()
    async with harness(tmp_path / "areal") as preprocessor:
        await preprocessor.begin()
        assert not (await preprocessor.lease(0)).HasField("max_trajectories")
