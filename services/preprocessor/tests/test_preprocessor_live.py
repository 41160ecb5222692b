"""What policies get and do live: publishes that are held back, cancels that reach the actors and
stop their decoding.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from preprocessor_fakes import live_ledger, make_group, make_job
from preprocessor_harness import DEADLINE_S, PreprocessorHarness, Pulled, harness

from pipelinerl.v1 import batches_pb2
from pipelinerl_common.child_process import stop
from pipelinerl_common.errors import SettingsError
from pipelinerl_preprocessor.batch_service import Batches
from pipelinerl_preprocessor.ledger import Ledger
from pipelinerl_preprocessor.live import Broadcast, RingBuffer
from pipelinerl_preprocessor.loop import layout_of, policy_of, ring_buffer_groups
from pipelinerl_preprocessor.run_log import TrainedLog
from pipelinerl_staleness.openrlhf import Openrlhf, OpenrlhfSettings
from pipelinerl_staleness.policy import EngineLoad
from pipelinerl_staleness.prime_rl import PrimeRl, PrimeRlSettings

B = 2


def finish(ledger: Ledger, group_id: str, version: int = 0) -> None:
    ledger.arrive(group_id)
    assert ledger.ready(group_id, [version], [version])


def test_a_publish_that_is_held_back_too_long_goes_out() -> None:
    now = 0.0
    live = live_ledger(Openrlhf(OpenrlhfSettings(), B), lambda: now)
    ledger = live.ledger
    assert not live.gate.holds_back()
    for lease in ledger.grant("actor", "session", 9, now):
        finish(ledger, lease.group_id)
    groups = ledger.take().groups
    assert len(ledger.grant("actor", "session", 9, now)) == B
    ledger.commit(0, groups, last=False)
    assert not live.gate.may_publish(1)
    now = 9.0
    assert live.gate.holds_back()
    assert live.gate.num_forced == 0
    now = 10.5
    assert live.gate.may_publish(1)
    assert not live.gate.holds_back()
    assert live.gate.num_forced == 1
    assert live.gate.may_publish(1)


class Message:
    """A group from the stream. The first call of `ack` of one that `hangs` does not return."""

    group = make_group("0-0")

    def __init__(self, *, hangs: bool) -> None:
        self.hanging = asyncio.Event()
        self.num_acks = 0
        self._hangs = hangs

    async def ack(self) -> None:
        self.num_acks += 1
        if self._hangs and self.num_acks == 1:
            self.hanging.set()
            await asyncio.Event().wait()


async def test_a_commit_that_is_cut_short_is_finished_by_the_next_call(tmp_path: Path) -> None:
    live = live_ledger(Openrlhf(OpenrlhfSettings(), B))
    for lease in live.ledger.grant("actor", "session", B, 0.0):
        finish(live.ledger, lease.group_id)
    groups = live.ledger.take().groups
    messages = {group_id: Message(hangs=number == 0) for number, group_id in enumerate(groups)}
    live.received.update(messages)  # type: ignore[arg-type]
    batches = Batches(live, layout_of(make_job().spec), TrainedLog(tmp_path / "trained.jsonl"))
    request = batches_pb2.CommitStepRequest(step=0, batch_id="batch", group_ids=groups)
    journal = asyncio.create_task(live.journal.run())
    first, second = messages.values()
    call = asyncio.create_task(batches.CommitStep(request, None))
    await first.hanging.wait()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert second.num_acks == 0
    await batches.CommitStep(request, None)
    assert second.num_acks == 1
    assert not live.received
    journal.cancel()


async def test_a_policy_that_never_publishes_a_version_does_not_hold_it_either(
    tmp_path: Path,
) -> None:
    async with harness(
        tmp_path, staleness={"policy": "conventional", "stepsPerGeneration": 2}
    ) as preprocessor:
        await preprocessor.begin()
        await preprocessor.roll_out(4)
        pulled = await preprocessor.pull(0)
        assert not pulled.plan.publish_after
        await preprocessor.commit(0, pulled.plan.group_ids)
        assert (await preprocessor.pull(1)).plan.publish_after


@pytest.mark.parametrize(
    "policy",
    [{"policy": "openrlhf"}, {"policy": "slime", "prefetchFactor": 2}],
    ids=["openrlhf", "slime"],
)
async def test_a_publish_is_held_back_until_what_runs_is_complete(
    tmp_path: Path, policy: dict[str, Any]
) -> None:
    """openrlhf: one version per batch. slime: the next batch is there before the weights change."""
    async with harness(tmp_path, staleness=policy) as preprocessor:
        await preprocessor.begin()
        assert await preprocessor.may_publish(0)
        await preprocessor.roll_out(2)
        pulled = await preprocessor.pull(0)
        running = (await preprocessor.lease(2)).leases
        assert len(running) == 2
        await preprocessor.commit(0, pulled.plan.group_ids)
        assert not await preprocessor.may_publish(1)
        held = await preprocessor.pull_once(1, wait_s=0.05)
        assert held == "the weights of version 1 are held back by the policy"
        waiting = asyncio.create_task(preprocessor.may_publish(1, wait_s=20))
        for lease in running:
            await preprocessor.publish(lease)
        assert await waiting
        assert isinstance(await preprocessor.pull_once(1), Pulled)
        assert await preprocessor.may_publish(1)
        await preprocessor.mark_published(1)


async def test_groups_that_a_load_report_gives_up_are_cancelled_at_their_actor() -> None:
    live = live_ledger(PrimeRl(PrimeRlSettings(eta=2, group_size=2, initial_inflight=8), B))
    leases = live.ledger.grant("actor", "session", 9, 0.0)
    assert len(leases) == 4
    await live.observe(EngineLoad(kv_usage=None, num_waiting=0, num_preemptions=0, seconds=5.0))
    assert live.ledger.leases.renew("actor", [lease.lease_id for lease in leases], 0.0) == []
    await live.observe(EngineLoad(kv_usage=None, num_waiting=0, num_preemptions=3, seconds=5.0))
    assert live.ledger.leases.renew("actor", [lease.lease_id for lease in leases], 0.0) == [
        leases[-1].lease_id
    ]
    live.stopped(leases[-1].group_id, 7)  # the actor reports its tokens
    live.stopped(leases[0].group_id, 5)  # the run has ended meanwhile
    counted = {
        name: value
        for name, value in live.counters.metrics.values().items()
        if "_dropped_total" in name and value
    }
    assert counted == {
        "groups_dropped_total{reason=cancelled}": 1,
        "tokens_dropped_total{reason=cancelled}": 7,
        "tokens_dropped_total{reason=unfinished}": 5,
    }


def test_what_a_group_that_was_delivered_had_cost_is_no_waste() -> None:
    """An actor that waits for the stream's acknowledgement is ordered to stop: its lease ended when
    the message came.
    """
    live = live_ledger(Openrlhf(OpenrlhfSettings(), B))
    ledger = live.ledger
    leases = ledger.grant("actor", "session", 9, 0.0)
    for lease in leases:
        finish(ledger, lease.group_id)
        assert ledger.leases.renew("actor", [lease.lease_id], 0.0) == [lease.lease_id]
    live.stopped(leases[0].group_id, 20)
    ledger.commit(0, ledger.take().groups, last=False)
    live.stopped(leases[1].group_id, 30)
    assert not any(
        "dropped" in name and value for name, value in live.counters.metrics.values().items()
    )


def test_what_a_group_of_a_time_that_was_left_had_cost_is_counted_as_rollback() -> None:
    live = live_ledger(Openrlhf(OpenrlhfSettings(), B))
    (lease, *_) = live.ledger.grant("actor", "session", 9, 0.0)
    live.ledger.restore("again", 0, None)
    live.stopped(lease.group_id, 6)
    assert live.counters.metrics.values()["tokens_dropped_total{reason=rollback}"] == 6


async def test_why_groups_ended_is_remembered_for_so_many_only() -> None:
    live = live_ledger(PrimeRl(PrimeRlSettings(), B))
    await live.given_up([f"0-{number}" for number in range(5000)], "expired")
    assert len(live.ended) < 5000
    live.stopped("0-4999", 3)
    assert live.counters.metrics.values()["tokens_dropped_total{reason=expired}"] == 3


def test_policies_that_count_trajectories_get_the_jobs_group_size() -> None:
    policy = policy_of(make_job(staleness={"policy": "prime_rl"}).spec)
    assert policy.settings.group_size == 2
    assert policy_of(make_job(staleness={"policy": "areal"}).spec).settings.eta == 1
    with pytest.raises(SettingsError, match=r"staleness.groupSize=8 differs from task.groupSize=2"):
        policy_of(make_job(staleness={"policy": "slime", "groupSize": 8}).spec)


@dataclass
class Generator:
    """Answers the first `num_answers` requests and lets the others decode indefinitely."""

    num_answers: int
    version: int = 0
    url: str = ""
    num_running: int = 0
    num_closed: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.num_answers > 0:
            self.num_answers -= 1
            return web.json_response(
                {
                    "model": "policy",
                    "prompt_token_ids": [3, 4],
                    "choices": [self._choice(n) for n in range(body["n"])],
                    "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
                }
            )
        self.num_running += 1
        self.changed.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.num_running -= 1
            self.num_closed += 1
            self.changed.set()
        raise AssertionError

    def _choice(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"content": "7"},
            "finish_reason": "stop",
            "token_ids": [5, 6],
            "token_logprobs": [-0.5, -0.5],
            "weight_versions": [[self.version, 2]],
        }

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Generator"]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


@asynccontextmanager
async def real_actor(
    preprocessor: PreprocessorHarness, generator: Generator
) -> AsyncIterator[None]:
    flags = {
        "--job": preprocessor.job_file,
        "--output": preprocessor.output,
        "--nats-url": preprocessor.nats.url,
        "--preprocessor": preprocessor.address,
        "--generator": generator.url,
    }
    arguments = [str(part) for flag in flags.items() for part in flag]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pipelinerl_actor.rollout", *arguments, env=dict(os.environ)
    )
    try:
        yield
    finally:
        await stop(process, 0)


@pytest.mark.parametrize(
    "policy",
    [{"policy": "roll", "rho": 1}, {"policy": "layered", "eta": 1}],
    ids=["roll", "layered"],
)
async def test_a_group_that_a_publish_cancels_stops_decoding_at_the_generator(
    tmp_path: Path, policy: dict[str, Any]
) -> None:
    task = {"path": "pipelinerl_actor.tasks.arithmetic:Arithmetic", "args": {"digits": 1}}
    async with (
        harness(tmp_path, staleness=policy, task=task) as preprocessor,
        Generator(num_answers=2).serving() as generator,
    ):
        await preprocessor.begin()
        async with real_actor(preprocessor, generator):
            await generator.until(
                lambda: generator.num_running == 2
            )  # two of four groups of version 0 hang
            pulled = await preprocessor.pull(0)
            await preprocessor.commit(0, pulled.plan.group_ids)
            generator.num_answers, generator.version = 2, 1
            await preprocessor.mark_published(1)  # their age of 1 is within the bound
            pulled = await preprocessor.pull(1)
            await preprocessor.commit(1, pulled.plan.group_ids)
            assert generator.num_closed == 0
            await preprocessor.mark_published(2)
            await generator.until(lambda: generator.num_closed == 2)
            metrics = await preprocessor.metrics_with("groups_dropped_total{reason=cancelled}", 2)
            assert metrics["groups_dropped_total{reason=cancelled}"] == 2
            assert (
                metrics.get("tokens_dropped_total{reason=cancelled}", 0) == 0
            )  # an answer that never came is not counted


def test_the_ring_buffer_lets_the_oldest_go() -> None:
    buffer = RingBuffer(2)
    assert [buffer.add(text) for text in ("a", "b", "c")] == [None, None, "a"]
    assert ("a" in buffer, "b" in buffer, len(buffer)) == (False, True, 2)
    buffer.discard("b")
    buffer.discard("b")
    assert len(buffer) == 1


@settings(deadline=None)
@given(room=st.integers(1, 5), ids=st.lists(st.integers(0, 50), unique=True))
def test_the_ring_buffer_keeps_the_newest(room: int, ids: list[int]) -> None:
    buffer = RingBuffer(room)
    gone = [buffer.add(str(each)) for each in ids]
    kept = [str(each) for each in ids if str(each) in buffer]
    assert kept == [str(each) for each in ids[-room:]]
    assert [each for each in gone if each is not None] == [
        str(each) for each in ids[: len(ids) - len(kept)]
    ]


@pytest.mark.parametrize(
    ("staleness", "wanted", "least"),
    [
        ({"policy": "areal", "eta": 3}, 3, 4),
        ({"policy": "conventional", "stepsPerGeneration": 4}, 15, 16),
    ],
)
def test_a_ring_buffer_in_which_no_batch_can_form_is_refused(
    staleness: dict[str, object], wanted: int, least: int
) -> None:
    def groups(size: int | None) -> int:
        spec = make_job(
            algorithm={"groupsPerStep": 4},
            staleness=staleness,
            preprocessor={"ringBufferGroups": size},
        ).spec
        return ring_buffer_groups(spec, policy_of(spec))

    with pytest.raises(
        SettingsError, match=f"ringBufferGroups={wanted} is too small.*needs {least} waiting"
    ):
        groups(wanted)
    assert groups(least) == least
    assert groups(None) == 16


async def test_a_broadcast_wakes_all_who_wait_now() -> None:
    broadcast = Broadcast()
    broadcast.notify()
    assert not await broadcast.wait(0.0)
    assert not await broadcast.wait(0.01)
    waiters = [asyncio.create_task(broadcast.wait(10.0)) for _ in range(3)]
    await asyncio.sleep(0)
    broadcast.notify()
    assert await asyncio.gather(*waiters) == [True, True, True]
