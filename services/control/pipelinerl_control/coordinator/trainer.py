"""The coordinator's view of trainer rank 0: the `Policy` service."""

from collections.abc import Callable
from dataclasses import dataclass

from pipelinerl.v1 import policy_pb2, policy_pb2_grpc
from pipelinerl_common import rpc
from pipelinerl_common.errors import PipelineRLError, Unavailable
from pipelinerl_control.coordinator.membership import SeenTrainer

PROBE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where a group meets."""

    address: str
    port: int


class TrainerClient:
    """Calls to `Policy` at `address()`, None while there is none; a fresh channel each, so that a
    restarted trainer is reached at once.
    """

    def __init__(self, address: Callable[[], str | None], token: str | None) -> None:
        self.address = address
        self._token = token

    async def probe(self) -> SeenTrainer | None:
        """The trainer's epoch and policy version, or None while it does not answer."""
        address = self.address()
        if address is None:
            return None
        try:
            async with rpc.connect(address, token=self._token) as channel:
                method = policy_pb2_grpc.PolicyStub(channel).GetPolicy
                response = await rpc.call(
                    method, policy_pb2.GetPolicyRequest(), timeout_s=PROBE_TIMEOUT_S
                )
        except PipelineRLError:
            return None
        return SeenTrainer(response.epoch, response.policy_version)

    async def join_group(
        self, *, epoch: int, world_size: int, backend: str, port: int, timeout_s: float
    ) -> Rendezvous:
        """Opens the rendezvous of a new group, ending the old one. Raises PipelineRLError."""
        request = policy_pb2.JoinGroupRequest(
            epoch=epoch, world_size=world_size, backend=backend, port=port, timeout_s=timeout_s
        )
        address = self.address()
        if address is None:
            raise Unavailable("the trainer has no address")
        async with rpc.connect(address, token=self._token) as channel:
            response = await rpc.call(
                policy_pb2_grpc.PolicyStub(channel).JoinGroup, request, timeout_s=timeout_s
            )
        return Rendezvous(response.master_address, response.master_port)
