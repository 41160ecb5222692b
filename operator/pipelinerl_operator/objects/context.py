"""What the constructors know besides the job: the operator's settings and the cluster's
capabilities.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipelinerl_control.plan import Role


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the API server offers. The defaults are those of a current one."""

    minor_version: int = 36
    """Minor version of Kubernetes 1.x."""
    api_versions: frozenset[str] = frozenset({"policy/v1"})
    """API groups with versions, as discovery lists them: "policy/v1"."""

    @property
    def grpc_probes(self) -> bool:
        """Whether gRPC probes exist, as since 1.24; before, a service is probed by its port."""
        return self.minor_version >= 24

    @property
    def policy_api(self) -> str:
        return "policy/v1" if "policy/v1" in self.api_versions else "policy/v1beta1"

    @property
    def namespace_name_label(self) -> bool:
        """Whether namespaces have the label kubernetes.io/metadata.name, as since 1.21."""
        return self.minor_version >= 21


@dataclass(frozen=True, slots=True)
class Peer:
    """Pods that a NetworkPolicy admits, of all namespaces unless one is given."""

    labels: Mapping[str, str]
    namespace: str | None = None

    def selector(self, capabilities: Capabilities) -> dict[str, Any]:
        """The NetworkPolicyPeer. Without labels of names it cannot select one namespace."""
        by_name = self.namespace is not None and capabilities.namespace_name_label
        namespaces = (
            {"matchLabels": {"kubernetes.io/metadata.name": self.namespace}} if by_name else {}
        )
        pods = {"podSelector": {"matchLabels": dict(self.labels)}} if self.labels else {}
        return {"namespaceSelector": namespaces, **pods}


@dataclass(frozen=True, slots=True)
class OperatorContext:
    """The operator's settings from its chart, and what it found out about the cluster."""

    images: Mapping[Role, str]
    """Default image of each role that has pods."""
    coordinator: str
    """`host:port` of the weight-transfer coordinator as pods reach it."""
    nats_url: str
    capabilities: Capabilities = Capabilities()
    image_pull_policy: str | None = None
    """None leaves it to the server: Always for the tag `latest`, else IfNotPresent."""
    image_pull_secrets: tuple[str, ...] = ()
    """Secrets besides those of the job."""
    has_nats_credentials: bool = False
    """Whether the job's Secret has the key nats.creds."""
    nats_ca: str | None = None
    """CA certificates (PEM) of the stream server; None: those of the image."""
    operator: Peer = field(default_factory=lambda: Peer({"app.kubernetes.io/name": "pipelinerl"}))
    """The operator's pods, which call generators and trainers."""
    monitoring: tuple[Peer, ...] = (Peer({}),)
    """Pods that may scrape metrics; by default all."""
    network_policy: bool = True
    log_level: str = "info"
