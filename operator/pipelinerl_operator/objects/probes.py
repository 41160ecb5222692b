"""How the kubelet asks a container. Liveness is about the process alone: a weight transfer or a
long step never fails it.
"""

import math
from typing import Any

from pipelinerl_operator.objects.context import Capabilities
from pipelinerl_operator.objects.ports import GRPC_PORT

PERIOD_S = 10
_STARTUP_FAILURES = 60
"""Ten minutes: imports from a slow disk, and a long journal."""
_LIVENESS_FAILURES = 18
"""Three minutes without an answer, as in `pipelinerl up`."""


def generator_probes(port: int, startup_s: float) -> dict[str, Any]:
    """/health answers once the engine runs, /ready once it has the weights of the current group."""

    def get(path: str, **numbers: int) -> dict[str, Any]:
        return {
            "httpGet": {"path": path, "port": port},
            "periodSeconds": PERIOD_S,
            "timeoutSeconds": 5,
            **numbers,
        }

    return {
        "startupProbe": get("/health", failureThreshold=max(1, math.ceil(startup_s / PERIOD_S))),
        "livenessProbe": get("/health", failureThreshold=_LIVENESS_FAILURES),
        "readinessProbe": get("/ready", failureThreshold=2),
    }


def grpc_readiness(capabilities: Capabilities) -> dict[str, Any]:
    """Whether a gRPC service serves."""
    return {"readinessProbe": _grpc(capabilities, 3)}


def grpc_probes(capabilities: Capabilities) -> dict[str, Any]:
    """Of a service that does nothing else than serve, so that one which does not answer is to be
    started again.
    """
    return {
        "startupProbe": _grpc(capabilities, _STARTUP_FAILURES),
        "livenessProbe": _grpc(capabilities, _LIVENESS_FAILURES),
        **grpc_readiness(capabilities),
    }


def _grpc(capabilities: Capabilities, failures: int) -> dict[str, Any]:
    ask = (
        {"grpc": {"port": GRPC_PORT}}
        if capabilities.grpc_probes
        else {"tcpSocket": {"port": GRPC_PORT}}
    )
    return {**ask, "periodSeconds": PERIOD_S, "timeoutSeconds": 5, "failureThreshold": failures}
