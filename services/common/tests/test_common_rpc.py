"""Real gRPC on port 0: deadlines, error mapping in both directions, token, health, reflection,
shutdown.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pipelinerl.v1 import batches_pb2, batches_pb2_grpc, policy_pb2, policy_pb2_grpc
from pipelinerl_common.errors import (
    FatalError,
    MalformedMessage,
    PermanentError,
    Refused,
    SettingsError,
    TemporaryError,
    Unavailable,
)
from pipelinerl_common.rpc import RpcServer, RpcService, call, connect, serve, stream_call


class Policy(policy_pb2_grpc.PolicyServicer):
    """Raises `error`, or answers after `release` is set."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.release = asyncio.Event()
        self.release.set()
        self.num_calls = 0

    async def AwaitGroup(
        self, request: policy_pb2.AwaitGroupRequest, context: object
    ) -> policy_pb2.AwaitGroupResponse:
        raise NotImplementedError

    async def JoinGroup(
        self, request: policy_pb2.JoinGroupRequest, context: Any
    ) -> policy_pb2.JoinGroupResponse:
        self.num_calls += 1
        if self.error is not None:
            raise self.error
        return policy_pb2.JoinGroupResponse(master_port=request.port)

    async def GetPolicy(
        self, request: policy_pb2.GetPolicyRequest, context: Any
    ) -> policy_pb2.GetPolicyResponse:
        await self.release.wait()
        return policy_pb2.GetPolicyResponse(policy_version=7)


class Batches(batches_pb2_grpc.BatchesServicer):
    """Streams `num_responses` micro-batches, then raises `error`."""

    num_responses = 3
    error: Exception | None = None

    async def PullStep(
        self, request: Any, context: Any
    ) -> AsyncIterator[batches_pb2.PullStepResponse]:
        for index in range(self.num_responses):
            yield batches_pb2.PullStepResponse(micro_batch=batches_pb2.MicroBatch(index=index))
        if self.error is not None:
            raise self.error

    async def CommitStep(self, request: Any, context: Any) -> Any: ...
    async def MarkPublished(self, request: Any, context: Any) -> Any: ...
    async def WaitPublishable(self, request: Any, context: Any) -> Any: ...
    async def GetSnapshot(self, request: Any, context: Any) -> Any: ...
    async def Restore(self, request: Any, context: Any) -> Any: ...


def services(policy: Policy, batches: Batches) -> list[RpcService]:
    return [
        RpcService(policy_pb2_grpc.add_PolicyServicer_to_server, policy, "pipelinerl.v1.Policy"),
        RpcService(
            batches_pb2_grpc.add_BatchesServicer_to_server, batches, "pipelinerl.v1.Batches"
        ),
    ]


@pytest.fixture
async def policy() -> Policy:
    return Policy()


@pytest.fixture
def batches() -> Batches:
    return Batches()


@pytest.fixture
async def server(policy: Policy, batches: Batches) -> AsyncIterator[RpcServer]:
    async with serve("127.0.0.1:0", services(policy, batches), token=None, grace_s=0.1) as running:
        yield running


async def test_port_zero_becomes_a_real_port_and_calls_pass(server: RpcServer) -> None:
    assert server.address == f"127.0.0.1:{server.port}"
    assert server.port > 0
    async with connect(server.address, token=None) as channel:
        response = await call(
            policy_pb2_grpc.PolicyStub(channel).JoinGroup,
            policy_pb2.JoinGroupRequest(port=11),
            timeout_s=5,
        )
    assert response.master_port == 11


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (SettingsError("port=-1"), PermanentError),
        (MalformedMessage("length 3"), PermanentError),
        (PermanentError("no"), PermanentError),
        (Refused("epoch 3 is not newer than 4"), Refused),
        (Unavailable("not restored"), Unavailable),
        (TemporaryError("later"), Unavailable),
        (FatalError("broken"), TemporaryError),
        (KeyError("surprise"), TemporaryError),
    ],
)
async def test_errors_of_handlers_arrive_as_ours(
    server: RpcServer, policy: Policy, raised: Exception, expected: type[Exception]
) -> None:
    policy.error = raised
    async with connect(server.address, token=None) as channel:
        with pytest.raises(expected, match="Policy/JoinGroup") as caught:
            await call(
                policy_pb2_grpc.PolicyStub(channel).JoinGroup,
                policy_pb2.JoinGroupRequest(),
                timeout_s=5,
            )
    assert type(caught.value) is expected
    assert raised.args[0] in str(caught.value)


async def test_unexpected_errors_are_logged_and_expected_ones_are_not(
    server: RpcServer, policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    async with connect(server.address, token=None) as channel:
        stub = policy_pb2_grpc.PolicyStub(channel)
        for error in (Refused("no"), KeyError("surprise")):
            policy.error = error
            with pytest.raises((Refused, TemporaryError)):
                await call(stub.JoinGroup, policy_pb2.JoinGroupRequest(), timeout_s=5)
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [str(record.exc_info[1]) for record in errors if record.exc_info] == ["'surprise'"]


async def test_error_messages_of_any_length_pass(server: RpcServer, policy: Policy) -> None:
    policy.error = Refused("x" * 100_000)
    async with connect(server.address, token=None) as channel:
        with pytest.raises(Refused):
            await call(
                policy_pb2_grpc.PolicyStub(channel).JoinGroup,
                policy_pb2.JoinGroupRequest(),
                timeout_s=5,
            )


async def test_deadline_ends_a_call(server: RpcServer, policy: Policy) -> None:
    policy.release.clear()
    async with connect(server.address, token=None) as channel:
        with pytest.raises(Unavailable, match="DEADLINE_EXCEEDED"):
            await call(
                policy_pb2_grpc.PolicyStub(channel).GetPolicy,
                policy_pb2.GetPolicyRequest(),
                timeout_s=0.05,
            )


async def test_an_absent_peer_is_unavailable() -> None:
    async with serve("127.0.0.1:0", [], token=None) as gone:
        pass
    async with connect(gone.address, token=None) as channel:
        with pytest.raises(Unavailable, match="UNAVAILABLE"):
            await call(
                policy_pb2_grpc.PolicyStub(channel).GetPolicy,
                policy_pb2.GetPolicyRequest(),
                timeout_s=5,
            )


async def test_retry_outlives_a_restart_of_the_peer(policy: Policy, batches: Batches) -> None:
    async with serve("127.0.0.1:0", [], token=None) as gone:
        pass
    async with connect(gone.address, token=None) as channel:
        pending = asyncio.ensure_future(
            call(
                policy_pb2_grpc.PolicyStub(channel).GetPolicy,
                policy_pb2.GetPolicyRequest(),
                timeout_s=5,
                retry_s=30,
            )
        )
        await asyncio.wait([pending], timeout=0.3)
        assert not pending.done()
        async with serve(gone.address, services(policy, batches), token=None):
            assert (await pending).policy_version == 7


async def test_permanent_errors_are_not_retried(server: RpcServer, policy: Policy) -> None:
    policy.error = Refused("no")
    async with connect(server.address, token=None) as channel:
        with pytest.raises(Refused):
            await call(
                policy_pb2_grpc.PolicyStub(channel).JoinGroup,
                policy_pb2.JoinGroupRequest(),
                timeout_s=5,
                retry_s=30,
            )
    assert policy.num_calls == 1


async def test_unavailable_answers_are_retried(server: RpcServer, policy: Policy) -> None:
    policy.error = Unavailable("not restored")
    async with connect(server.address, token=None) as channel:
        with pytest.raises(Unavailable):
            await call(
                policy_pb2_grpc.PolicyStub(channel).JoinGroup,
                policy_pb2.JoinGroupRequest(),
                timeout_s=5,
                retry_s=0.4,
            )
    assert policy.num_calls >= 2


async def test_streams_deliver_in_order_and_then_raise(server: RpcServer, batches: Batches) -> None:
    batches.error = Refused("step 5 is neither the next nor the current one")
    async with connect(server.address, token=None) as channel:
        responses = stream_call(
            batches_pb2_grpc.BatchesStub(channel).PullStep,
            batches_pb2.PullStepRequest(),
            timeout_s=5,
        )
        received = [(await anext(responses)).micro_batch.index for _ in range(3)]
        with pytest.raises(Refused, match="neither the next"):
            await anext(responses)
    assert received == [0, 1, 2]


async def test_large_messages_pass(
    server: RpcServer, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = batches_pb2.PullStepResponse(
        micro_batch=batches_pb2.MicroBatch(input_ids=bytes(20 << 20))
    )

    async def pull(request: Any, context: Any) -> AsyncIterator[batches_pb2.PullStepResponse]:
        yield large

    batches.PullStep = pull  # type: ignore[method-assign]
    async with (
        serve("127.0.0.1:0", services(Policy(), batches), token=None) as other,
        connect(other.address, token=None) as channel,
    ):
        stream = stream_call(
            batches_pb2_grpc.BatchesStub(channel).PullStep,
            batches_pb2.PullStepRequest(),
            timeout_s=30,
        )
        assert [len(response.micro_batch.input_ids) async for response in stream] == [20 << 20]


@pytest.mark.parametrize("given", [None, "wrong", ""])
async def test_calls_without_the_token_are_refused(
    policy: Policy, batches: Batches, given: str | None
) -> None:
    async with (
        serve("127.0.0.1:0", services(policy, batches), token="secret") as server,
        connect(server.address, token=given) as channel,
    ):
        with pytest.raises(PermanentError, match="UNAUTHENTICATED"):
            await call(
                policy_pb2_grpc.PolicyStub(channel).GetPolicy,
                policy_pb2.GetPolicyRequest(),
                timeout_s=5,
            )
        pull = stream_call(
            batches_pb2_grpc.BatchesStub(channel).PullStep,
            batches_pb2.PullStepRequest(),
            timeout_s=5,
        )
        with pytest.raises(PermanentError, match="UNAUTHENTICATED"):
            await anext(pull)


async def test_calls_with_the_token_pass(policy: Policy, batches: Batches) -> None:
    async with (
        serve("127.0.0.1:0", services(policy, batches), token="secret") as server,
        connect(server.address, token="secret") as channel,
    ):
        await call(
            policy_pb2_grpc.PolicyStub(channel).GetPolicy,
            policy_pb2.GetPolicyRequest(),
            timeout_s=5,
        )
        pull = stream_call(
            batches_pb2_grpc.BatchesStub(channel).PullStep,
            batches_pb2.PullStepRequest(),
            timeout_s=5,
        )
        assert len([response async for response in pull]) == 3


async def test_health_is_open_and_ends_with_the_server(policy: Policy, batches: Batches) -> None:
    serving = serve("127.0.0.1:0", services(policy, batches), token="secret", grace_s=5)
    server = await serving.__aenter__()
    async with connect(server.address, token=None) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "pipelinerl.v1.Policy", "pipelinerl.v1.Batches"):
            answer = await call(
                stub.Check, health_pb2.HealthCheckRequest(service=name), timeout_s=5
            )
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        watch = stream_call(
            stub.Watch, health_pb2.HealthCheckRequest(service="pipelinerl.v1.Policy"), timeout_s=10
        )
        assert (await anext(watch)).status == health_pb2.HealthCheckResponse.SERVING
        closing = asyncio.ensure_future(serving.__aexit__(None, None, None))
        assert (await anext(watch)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await watch.aclose()
        await asyncio.wait_for(closing, 10)


async def test_running_calls_end_at_the_grace_period(policy: Policy, batches: Batches) -> None:
    policy.release.clear()
    async with serve("127.0.0.1:0", services(policy, batches), token=None, grace_s=0.1) as server:
        channel_context = connect(server.address, token=None)
        channel = await channel_context.__aenter__()
        stub = policy_pb2_grpc.PolicyStub(channel)
        pending = asyncio.ensure_future(
            call(stub.GetPolicy, policy_pb2.GetPolicyRequest(), timeout_s=60)
        )
        await asyncio.wait([pending], timeout=0.2)
    with pytest.raises(Unavailable):
        await asyncio.wait_for(pending, 10)
    await channel_context.__aexit__(None, None, None)


async def test_reflection_lists_the_services(server: RpcServer) -> None:
    async with connect(server.address, token=None) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        stream = stub.ServerReflectionInfo(iter([request]), timeout=5)
        names = {
            service.name
            async for response in stream
            for service in response.list_services_response.service
        }
    assert {"pipelinerl.v1.Policy", "pipelinerl.v1.Batches", "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize(
    "listen",
    ["127.0.0.1", "127.0.0.1:http", ":80", "127.0.0.1:70000", "no-such-host.invalid:50051"],
)
async def test_a_wrong_address_is_named(listen: str) -> None:
    with pytest.raises(SettingsError, match=f"listen='{listen}'"):
        async with serve(listen, [], token=None):
            pass


async def test_an_occupied_port_is_named(server: RpcServer) -> None:
    with pytest.raises(SettingsError, match=f"listen='{server.address}'.*another process"):
        async with serve(server.address, [], token=None):
            pass
