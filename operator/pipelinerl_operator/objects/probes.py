"""How the kubelet asks a container. Liveness is about the process alone: a weight transfer or a long step never fails it."""

import math
from typing import Any

from pipelinerl_operator.objects.context import Capabilities
from pipelinerl_operator.objects.ports import GRPC_PORT

PERIOD_S = 10
_LIVENESS_FAILURES = 18
"""Three minutes without an answer."""


def generator_probes(port: int, startup_s: float) -> dict[str, Any]:
    """/health answers once the engine runs, /ready once it has the weights of the current group."""

    def get(path: str, **numbers: int) -> dict[str, Any]:
        return {"httpGet": {"path": path, "port": port}, "periodSeconds": PERIOD_S, "timeoutSeconds": 5, **numbers}

    return {
        "startupProbe": get("/health", failureThreshold=max(1, math.ceil(startup_s / PERIOD_S))),
        "livenessProbe": get("/health", failureThreshold=_LIVENESS_FAILURES),
        "readinessProbe": get("/ready", failureThreshold=2),
    }


def grpc_readiness(capabilities: Capabilities) -> dict[str, Any]:
    """Whether a gRPC service serves."""
    ask = {"grpc": {"port": GRPC_PORT}} if capabilities.grpc_probes else {"tcpSocket": {"port": GRPC_PORT}}
    return {"readinessProbe": {**ask, "periodSeconds": PERIOD_S, "timeoutSeconds": 5, "failureThreshold": 3}}
