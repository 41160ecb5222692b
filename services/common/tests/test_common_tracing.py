"""Spans as they reach a collector: parents, links, sampling, how contexts travel, and what happens
without tracing.
"""

import asyncio
import logging
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from bench.collector import Collector, collecting
from pipelinerl.v1 import policy_pb2, policy_pb2_grpc
from pipelinerl_common import rpc
from pipelinerl_common.settings import Job, parse_job
from pipelinerl_common.telemetry import _LineFormatter
from pipelinerl_common.tracing import Tracer, caller, current, headers, open_tracer, span

DEADLINE_S = 30.0


def job(endpoint: str | None, ratio: float = 1.0) -> Job:
    tracing = (
        {}
        if endpoint is None
        else {"telemetry": {"tracing": {"endpoint": endpoint, "sampleRatio": ratio}}}
    )
    spec = {"model": {"uri": "tiny://arithmetic"}, "task": {"path": "tasks:Sums"}, **tracing}
    document = {
        "apiVersion": "pipelinerl.dev/v1alpha1",
        "kind": "PipelineRLJob",
        "metadata": {"name": "sums"},
        "spec": spec,
    }
    return parse_job(document, source="test")


@asynccontextmanager
async def traced(ratio: float = 1.0) -> AsyncIterator[tuple[Tracer, Collector]]:
    with collecting() as (endpoint, collector):
        async with open_tracer(job(endpoint, ratio), "actor", "actor-0") as tracer:
            yield tracer, collector


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_spans_nest_link_and_go_on_elsewhere() -> None:
    async with traced() as (tracer, collector):
        with tracer.root("grant", group="0-1") as grant:
            with span("inner", n=2) as inner:
                assert headers() == {"traceparent": inner.traceparent}
            elsewhere = grant.traceparent
        assert headers() == {}
        with tracer.continued("rollout", elsewhere), span("verify"):
            await asyncio.create_task(asyncio.sleep(0))
        with tracer.root("optimizer step", [elsewhere, "nonsense"]):
            pass
    await until(lambda: len(collector.spans) == 5)
    [first], [inside], [rollout], [verify], [step] = (
        collector.named(name) for name in ("grant", "inner", "rollout", "verify", "optimizer step")
    )
    assert (first.service, first.parent, first.attributes) == (
        "pipelinerl-actor",
        "",
        {"group": "0-1"},
    )
    assert (inside.parent, inside.trace, inside.attributes) == (first.id, first.trace, {"n": 2})
    assert (rollout.parent, rollout.trace, verify.parent) == (first.id, first.trace, rollout.id)
    assert (step.parent, step.links) == ("", (first.id,))
    assert step.trace != first.trace


async def test_a_share_of_the_groups_is_traced_and_the_rest_costs_nothing() -> None:
    async with traced(ratio=0.0) as (tracer, collector):
        with tracer.sampled_root("grant") as grant, span("inner"):
            assert grant.traceparent == ""
        with tracer.continued("rollout", grant.traceparent), span("verify"):
            assert headers() == {}
        with tracer.root("optimizer step"):
            pass
    await until(lambda: collector.spans)
    assert [each.name for each in collector.spans] == ["optimizer step"]


async def test_tasks_are_part_of_the_span_that_starts_them() -> None:
    async def work() -> str:
        with span("work") as working:
            return working.trace_id

    async with traced() as (tracer, _):
        with tracer.root("grant") as grant:
            ids = await asyncio.gather(work(), asyncio.create_task(work()))
        assert set(ids) == {grant.trace_id}
        assert await work() == ""


class Policy(policy_pb2_grpc.PolicyServicer):
    callers: list[str] = []

    async def GetPolicy(
        self, request: policy_pb2.GetPolicyRequest, context: object
    ) -> policy_pb2.GetPolicyResponse:
        self.callers.append(caller())
        return policy_pb2.GetPolicyResponse()

    async def AwaitGroup(
        self, request: policy_pb2.AwaitGroupRequest, context: object
    ) -> policy_pb2.AwaitGroupResponse:
        raise NotImplementedError

    async def JoinGroup(
        self, request: policy_pb2.JoinGroupRequest, context: object
    ) -> policy_pb2.JoinGroupResponse:
        raise NotImplementedError


async def test_calls_carry_the_context() -> None:
    policy = Policy()
    service = rpc.RpcService(
        policy_pb2_grpc.add_PolicyServicer_to_server, policy, "pipelinerl.v1.Policy"
    )
    async with (
        traced() as (tracer, _),
        rpc.serve("127.0.0.1:0", [service], token=None) as server,
        rpc.connect(server.address, token=None) as channel,
    ):
        method = policy_pb2_grpc.PolicyStub(channel).GetPolicy
        with tracer.root("weight update") as update:
            await rpc.call(method, policy_pb2.GetPolicyRequest(), timeout_s=10)
        await rpc.call(method, policy_pb2.GetPolicyRequest(), timeout_s=10)
    assert policy.callers == [update.traceparent, ""]


async def test_log_lines_end_with_the_trace() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "step=3", None, None)
    formatter = _LineFormatter("trainer-0", tracebacks=False)
    async with traced() as (tracer, _):
        with tracer.root("optimizer step") as step:
            assert formatter.format(record).endswith(f"step=3 trace={step.trace_id}")
    assert formatter.format(record).endswith("step=3")


async def test_a_collector_that_is_away_costs_spans_and_no_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_tracer(job("http://127.0.0.1:9"), "actor", "actor-0") as tracer:
        began = time.monotonic()
        for _ in range(20_000):
            with tracer.root("grant"):
                pass
        assert time.monotonic() - began < DEADLINE_S
        assert current().traceparent == ""


async def test_without_tracing_opentelemetry_is_not_even_imported() -> None:
    program = """
import asyncio, sys
sys.path.insert(0, "services/common/tests")
from pipelinerl_common.tracing import open_tracer, span, headers
from pipelinerl_common.settings import parse_job
spec = {"model": {"uri": "tiny://arithmetic"}, "task": {"path": "tasks:Sums"}}
kinds = {"apiVersion": "pipelinerl.dev/v1alpha1", "kind": "PipelineRLJob"}
document = {**kinds, "metadata": {"name": "sums"}, "spec": spec}
async def main():
    async with open_tracer(parse_job(document, "test"), "actor", "actor-0") as tracer:
        with tracer.root("grant"), tracer.sampled_root("x"):
            with tracer.continued("rollout", "00-1"), span("inner"):
                assert headers() == {}
asyncio.run(main())
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
