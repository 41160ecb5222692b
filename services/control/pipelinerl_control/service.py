"""The `WeightTransfer` service in front of one coordinator, or of one per job, selected by the
bearer token of a call.
"""

import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from pipelinerl.v1 import weights_pb2, weights_pb2_grpc
from pipelinerl_common import rpc
from pipelinerl_common.errors import Unavailable
from pipelinerl_common.generator_client import GeneratorError
from pipelinerl_common.settings import WeightTransferSettings
from pipelinerl_control.coordinator import Coordinator
from pipelinerl_control.transfer import UpdateReply

FULL_NAME = "pipelinerl.v1.WeightTransfer"


class WeightTransferServicer(weights_pb2_grpc.WeightTransferServicer):
    """Publishes versions through the coordinator that `find` returns for a call's context.

    `find` raises Unavailable when there is none.
    """

    def __init__(self, find: Callable[[Any], Coordinator]) -> None:
        self._find = find

    async def PublishVersion(
        self, request: weights_pb2.PublishVersionRequest, context: Any
    ) -> weights_pb2.PublishVersionResponse:
        outcome = await self._find(context).publish(
            request.epoch,
            request.policy_version,
            request.manifest,
            allow_rollback=request.allow_rollback,
            timeout_s=request.timeout_s,
        )
        members = [
            member_result(name, reply, outcome.expelled.get(name))
            for name, reply in outcome.replies.items()
        ]
        return weights_pb2.PublishVersionResponse(published=outcome.published, members=members)

    async def GetGroup(
        self, request: weights_pb2.GetGroupRequest, context: Any
    ) -> weights_pb2.GetGroupResponse:
        coordinator = self._find(context)
        group = coordinator.group
        return weights_pb2.GetGroupResponse(
            epoch=group.epoch if group else 0,
            members=group.names if group else (),
            served_version=coordinator.served_version,
        )


def member_result(name: str, reply: UpdateReply, expelled: str | None) -> weights_pb2.MemberResult:
    """One member's reply for the trainer. `expelled` is why the member is excluded, if it is.

    A failed member serves the version that it reports, -1 when it reports none.
    """
    if isinstance(reply, GeneratorError):
        return weights_pb2.MemberResult(
            generator=name,
            ok=False,
            error=expelled or str(reply),
            policy_version=reply.serving_version,
        )
    if expelled is not None:
        return weights_pb2.MemberResult(generator=name, ok=False, error=expelled, policy_version=-1)
    return weights_pb2.MemberResult(
        generator=name,
        ok=True,
        policy_version=reply.version,
        checksum=reply.checksum,
        pause_s=reply.pause_s,
        transfer_s=reply.transfer_s,
        apply_s=reply.apply_s,
        num_running=reply.num_running,
    )


def weight_transfer(find: Callable[[Any], Coordinator]) -> rpc.RpcService:
    """The gRPC service; `find` returns the coordinator that a call is meant for."""
    servicer = WeightTransferServicer(find)
    return rpc.RpcService(
        weights_pb2_grpc.add_WeightTransferServicer_to_server, servicer, FULL_NAME
    )


@dataclass(frozen=True, slots=True)
class RunningCoordinator:
    """A coordinator whose server answers; the caller schedules `coordinator.run()`."""

    coordinator: Coordinator
    address: str


@asynccontextmanager
async def serve_coordinator(
    settings: WeightTransferSettings,
    generators: Callable[[], Mapping[str, str]],
    *,
    trainer_address: str,
    listen: str,
    token: str | None,
) -> AsyncIterator[RunningCoordinator]:
    """A coordinator with its server on `listen`. Raises SettingsError when the address cannot be
    bound.
    """
    coordinator = Coordinator(settings, generators, lambda: trainer_address, token=token)
    async with rpc.serve(
        listen, [weight_transfer(lambda context: coordinator)], token=token
    ) as server:
        try:
            yield RunningCoordinator(coordinator, server.address)
        finally:
            await coordinator.close()


class TokenRoutes:
    """Finds the coordinator of a call by the bearer token that it carries.

    Keyed by the token's hash, so that the time of a lookup reveals nothing about other tokens.
    """

    def __init__(self) -> None:
        self._by_digest: dict[bytes, Coordinator] = {}

    def add(self, token: str, coordinator: Coordinator) -> None:
        self._by_digest[_digest(f"Bearer {token}")] = coordinator

    def remove(self, token: str) -> None:
        self._by_digest.pop(_digest(f"Bearer {token}"), None)

    def find(self, context: Any) -> Coordinator:
        """Raises Unavailable, which callers retry: a new leader does not know every job yet."""
        metadata = dict(context.invocation_metadata() or ())
        given = metadata.get("authorization", "")
        coordinator = self._by_digest.get(
            _digest(given if isinstance(given, str) else given.decode("utf-8", "replace"))
        )
        if coordinator is None:
            raise Unavailable("no job of this operator that runs has this bearer token")
        return coordinator


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
