"""What the constructors know beside the job: the operator's own settings and what the cluster can
do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipelinerl_control.plan import Role


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the API server offers. The defaults are those of a current one."""

    minor_version: int = 36
    """Of Kubernetes 1.x."""
    api_versions: frozenset[str] = frozenset({"policy/v1"})
    """Groups with their version, as discovery lists them: "policy/v1",
    "scheduling.volcano.sh/v1beta1".
    """

    @property
    def grpc_probes(self) -> bool:
        """On by default since 1.24; before that a gRPC service is probed by opening its port."""
        return self.minor_version >= 24

    @property
    def policy_api(self) -> str:
        return "policy/v1" if "policy/v1" in self.api_versions else "policy/v1beta1"

    @property
    def namespace_name_label(self) -> bool:
        """Whether every namespace carries its name in the label kubernetes.io/metadata.name, as
        since 1.21.
        """
        return self.minor_version >= 21


@dataclass(frozen=True, slots=True)
class Peer:
    """Pods that a NetworkPolicy lets in. Without a namespace: of every one."""

    labels: Mapping[str, str]
    namespace: str | None = None

    def selector(self, capabilities: Capabilities) -> dict[str, Any]:
        """A NetworkPolicyPeer. A server that does not label namespaces by name cannot narrow it to
        one.
        """
        by_name = self.namespace is not None and capabilities.namespace_name_label
        namespaces = (
            {"matchLabels": {"kubernetes.io/metadata.name": self.namespace}} if by_name else {}
        )
        pods = {"podSelector": {"matchLabels": dict(self.labels)}} if self.labels else {}
        return {"namespaceSelector": namespaces, **pods}


@dataclass(frozen=True, slots=True)
class OperatorContext:
    """Given to the operator by its chart, and found out about the cluster at its start."""

    images: Mapping[Role, str]
    """Image of each pod role without one in the job: ACTOR, TRAINER, PREPROCESSOR, REFERENCE,
    EVALUATOR.
    """
    coordinator: str
    """`host:port` of the weight-transfer coordinator as pods reach it."""
    nats_url: str
    capabilities: Capabilities = Capabilities()
    image_pull_policy: str | None = None
    """Unset leaves it to the server: Always for a tag `latest`, else IfNotPresent."""
    image_pull_secrets: tuple[str, ...] = ()
    """Beside the job's own."""
    has_nats_credentials: bool = False
    """Whether the job's Secret has the key nats.creds."""
    nats_ca: str | None = None
    """Certificates (PEM) that services trust the stream's server by; None: what their image trusts.
    """
    operator: Peer = field(default_factory=lambda: Peer({"app.kubernetes.io/name": "pipelinerl"}))
    """The operator's pods, which speak to generators and trainers."""
    monitoring: tuple[Peer, ...] = (Peer({}),)
    """Who may scrape metrics: by default any pod."""
    network_policy: bool = True
    log_level: str = "info"
