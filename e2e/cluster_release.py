"""The chart as tests install it: two replicas of the operator, a NATS that keeps its streams, every
default of security.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_job import volume
from cluster_session import OURS, ROOT, STATE, Cluster, wait_for

CHART = ROOT / "charts" / "pipelinerl"
NAME, NAMESPACE = "prl", "pipelinerl-e2e"
CRD = "pipelinerljobs.pipelinerl.dev"
NEWER_FIELD, NEWER_COLUMN = "ttlSecondsAfterFinished", "Policy"
"""The field and the column that the CRD of `older_chart` lacks."""
LEADER = "app.kubernetes.io/component=operator,pipelinerl.dev/leader=true"


def older_chart(folder: Path) -> Path:
    """The chart as an earlier version may have been: an older number, and a CRD without one field
    and one column.
    """
    chart = shutil.copytree(CHART, folder / "older")
    for name, left_out in {
        "Chart.yaml": ("version:", "appVersion:"),
        "templates/crd.yaml": (f"{NEWER_FIELD}:", f"- {{name: {NEWER_COLUMN},"),
    }.items():
        lines = (chart / name).read_text().splitlines()
        kept = [line for line in lines if not line.strip().startswith(left_out)]
        assert len(kept) == len(lines) - len(left_out), f"{name} holds not each of {left_out} once"
        (chart / name).write_text(
            "\n".join([*kept, *(("version: 0.0.1", "appVersion: 0.0.1") * (name == "Chart.yaml"))])
        )
    return chart


@dataclass(frozen=True)
class Release:
    """The release of the chart that the cluster tests share."""

    cluster: Cluster

    def values(self) -> list[str]:
        tag = self.cluster.tag
        return [
            f"image.registry={self.cluster.registry}",
            f"image.tag={tag}",
            f"nats.image.tag={tag}",
        ]

    def other_tag(self) -> str:
        """Tag of another image of the operator, for upgrades."""
        return f"{self.cluster.tag}-next"

    def install(self, *more: str, chart: Path = CHART) -> None:
        """Installs or upgrades, and waits until every replica is ready."""
        if self.cluster.is_local:
            volume(self.cluster, NAMESPACE, f"data-{NAME}-pipelinerl-nats-0", "40Gi")
        flags = [flag for value in (*self.values(), *more) for flag in ("--set", value)]
        where = ("--namespace", NAMESPACE, "--create-namespace", "--wait", "--timeout", "180s")
        self.cluster.helm("upgrade", "--install", NAME, str(chart), *where, *flags)
        self.cluster.kubectl("label", "namespace", NAMESPACE, OURS, "--overwrite")

    def clear(self) -> None:
        """Removes what a session that was interrupted has left."""
        self.cluster.kubectl("delete", "namespace", "--selector", OURS, timeout_s=300)

    def uninstall(self) -> None:
        """Removes everything of these tests from the cluster, and nothing else."""
        self.cluster.helm(
            "uninstall", NAME, "--namespace", NAMESPACE, "--timeout", "60s", check=False
        )
        self.clear()
        crd = self.cluster.get("crd", CRD) or {"metadata": {}}
        if (
            crd["metadata"].get("annotations", {}).get("meta.helm.sh/release-namespace")
            == NAMESPACE
        ):
            self.cluster.kubectl("delete", "crd", CRD, timeout_s=120)
        if self.cluster.is_local:
            self.cluster.kubectl("delete", "pv", "--all", "--wait=false")
            shutil.rmtree(STATE / "volumes", ignore_errors=True)

    def pods(self, selector: str) -> list[dict[str, Any]]:
        found = self.cluster.items("pods", "--namespace", NAMESPACE, "--selector", selector)
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def uids(self, component: str) -> dict[str, str]:
        """UID by name of the pods of one component, "operator" or "nats"."""
        pods = self.pods(f"app.kubernetes.io/component={component}")
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods}

    def leader(self, timeout_s: float = 90) -> str:
        """Name of the pod that leads."""
        pods = wait_for("leading operator", lambda: self.pods(LEADER), timeout_s)
        return str(pods[0]["metadata"]["name"])
