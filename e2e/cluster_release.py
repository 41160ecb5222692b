"""The chart as tests install it: two replicas of the operator, a NATS that keeps its streams, every default of security."""

import shutil
from dataclasses import dataclass
from typing import Any

from cluster_job import volume
from cluster_session import ROOT, STATE, Cluster, wait_for

CHART = ROOT / "charts" / "pipelinerl"
NAME, NAMESPACE = "prl", "pipelinerl-e2e"
LEADER = "app.kubernetes.io/component=operator,pipelinerl.dev/leader=true"


@dataclass(frozen=True)
class Release:
    cluster: Cluster

    def values(self) -> list[str]:
        tag = self.cluster.tag
        return [f"image.registry={self.cluster.registry}", f"image.tag={tag}", f"nats.image.tag={tag}"]

    def other_tag(self) -> str:
        """Tag of another image of the operator, for upgrades."""
        return f"{self.cluster.tag}-next"

    def install(self, *more: str) -> None:
        """Installs or upgrades, and waits until every replica is ready."""
        if self.cluster.is_local:
            volume(self.cluster, NAMESPACE, f"data-{NAME}-pipelinerl-nats-0", "40Gi")
        flags = [flag for value in (*self.values(), *more) for flag in ("--set", value)]
        where = ("--namespace", NAMESPACE, "--create-namespace", "--wait", "--timeout", "180s")
        self.cluster.helm("upgrade", "--install", NAME, str(CHART), *where, *flags)
        self.cluster.kubectl("label", "namespace", NAMESPACE, "app.kubernetes.io/part-of=pipelinerl-e2e", "--overwrite")

    def uninstall(self) -> None:
        self.cluster.kubectl("delete", "prl", "--all", "--all-namespaces", "--wait=false", check=False)
        self.cluster.helm("uninstall", NAME, "--namespace", NAMESPACE, "--timeout", "60s", check=False)
        self.cluster.kubectl("delete", "namespace", NAMESPACE, timeout_s=120, check=False)
        if self.cluster.is_local:
            self.cluster.kubectl("delete", "pv", "--all", "--wait=false")
            shutil.rmtree(STATE / "volumes", ignore_errors=True)

    def pods(self, selector: str) -> list[dict[str, Any]]:
        found = self.cluster.items("pods", "--namespace", NAMESPACE, "--selector", selector)
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def leader(self, timeout_s: float = 90) -> str:
        """Name of the pod that leads."""
        pods = wait_for("leading operator", lambda: self.pods(LEADER), timeout_s)
        return str(pods[0]["metadata"]["name"])
