"""The `WeightTransfer` service in front of the coordinator."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from pipelinerl.v1 import weights_pb2, weights_pb2_grpc
from pipelinerl_common import rpc
from pipelinerl_common.settings import WeightTransferSettings
from pipelinerl_control.coordinator.coordinator import Coordinator
from pipelinerl_control.coordinator.generator import Answer

FULL_NAME = "pipelinerl.v1.WeightTransfer"


class WeightTransferServicer(weights_pb2_grpc.WeightTransferServicer):
    """`find` gives the coordinator of a call's job by the call's context, or raises Unavailable."""

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
            member_result(
                name, answer, outcome.expelled.get(name, answer.error), request.policy_version
            )
            for name, answer in outcome.answers.items()
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


def member_result(name: str, answer: Answer, error: str, version: int) -> weights_pb2.MemberResult:
    """One member's answer for the trainer. A failed member serves what it says itself, -1 when it
    says nothing.
    """
    if not answer.ok or error:
        reported = answer.body.get("error")
        serving = reported.get("serving_version") if isinstance(reported, Mapping) else None
        return weights_pb2.MemberResult(
            generator=name,
            ok=False,
            error=error,
            policy_version=serving if isinstance(serving, int) else -1,
        )
    body = answer.body
    return weights_pb2.MemberResult(
        generator=name,
        ok=True,
        policy_version=int(body.get("version", version)),
        checksum=str(body.get("checksum", "")),
        pause_s=float(body.get("pause_s", 0)),
        transfer_s=float(body.get("transfer_s", 0)),
        apply_s=float(body.get("apply_s", 0)),
        num_running=int(body.get("num_running", 0)),
    )


def weight_transfer(find: Callable[[Any], Coordinator]) -> rpc.RpcService:
    """The service for one coordinator or, with `find` telling them apart, for many."""
    servicer = WeightTransferServicer(find)
    return rpc.RpcService(
        weights_pb2_grpc.add_WeightTransferServicer_to_server, servicer, FULL_NAME
    )


@dataclass(frozen=True, slots=True)
class RunningCoordinator:
    """`await coordinator.run()` is the caller's to schedule; the server answers meanwhile."""

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
