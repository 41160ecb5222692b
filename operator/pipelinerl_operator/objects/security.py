"""Security contexts: what the pod security level `restricted` asks for, and one opt-in that it
refuses.
"""

from typing import Any

from pipelinerl_common.settings import NetworkSettings

GROUP = 1000
"""Group of the images' user; volumes of claims are made writable for it."""


def pod_security(*, owns_claims: bool) -> dict[str, Any]:
    """No user id: images bring a non-root one, and some clusters insist on their own."""
    group = {"fsGroup": GROUP, "fsGroupChangePolicy": "OnRootMismatch"} if owns_claims else {}
    return {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}, **group}


def container_security(network: NetworkSettings | None = None) -> dict[str, Any]:
    """`network` is given for containers with RDMA devices."""
    lock = network is not None and network.rdma is not None and network.rdma.ipc_lock
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"], **({"add": ["IPC_LOCK"]} if lock else {})},
    }
