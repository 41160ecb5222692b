"""gRPC as this project speaks it: a deadline on every call, our errors on both sides, bearer token,
health, reflection. Only this package imports grpc.

    policy_service = RpcService(add_PolicyServicer_to_server, policy, "pipelinerl.v1.Policy")
    async with serve("127.0.0.1:0", [policy_service], token=None) as server:
        async with connect(server.address, token=None) as channel:
            response = await call(PolicyStub(channel).GetPolicy, GetPolicyRequest(), timeout_s=5)
"""

from grpc.aio import Channel

from pipelinerl_common.rpc.client import call, connect, stream_call
from pipelinerl_common.rpc.server import RpcServer, RpcService, serve

__all__ = ["Channel", "RpcServer", "RpcService", "call", "connect", "serve", "stream_call"]
