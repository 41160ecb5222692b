"""A PipelineRLJob of the cluster tests: small, without a GPU, together with its namespace."""

import copy
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cluster_session import OURS, ROOT, STATE, Cluster, wait_for

ARITHMETIC = ROOT / "e2e" / "jobs" / "arithmetic.yaml"
MADE_MODELS = Path.home() / ".cache" / "pipelinerl"
"""Models that `pipelinerl up` made on this machine before: making one takes a minute."""
ENDLESS = 1_000_000
READY_S = 400.0
"""Longest time for a job to run, on two cores that others use too."""


def namespace_object(name: str) -> dict[str, Any]:
    """A namespace that refuses unrestricted pods, where the server enforces pod security."""
    key, _, value = OURS.partition("=")
    labels = {"pod-security.kubernetes.io/enforce": "restricted", key: value}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def volume(
    cluster: Cluster, namespace: str, name: str, size: str = "1Gi", folder: str = ""
) -> None:
    """A PersistentVolume for the claim `name`: a folder of the local cluster's node, which has no
    other storage.
    """
    path = STATE / "volumes" / (folder or f"{namespace}-{name}")
    if folder == "cache" and not path.exists() and MADE_MODELS.exists():
        shutil.copytree(MADE_MODELS, path / "pipelinerl")
    path.mkdir(parents=True, exist_ok=True)
    for each in (path, *path.glob("pipelinerl"), *path.glob("pipelinerl/models")):
        each.chmod(0o777)
    spec = {
        "capacity": {"storage": size},
        "accessModes": ["ReadWriteMany", "ReadWriteOnce"],
        "hostPath": {"path": str(path)},
        "claimRef": {"namespace": namespace, "name": name},
        "persistentVolumeReclaimPolicy": "Retain",
    }
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"{namespace}-{name}"},
            "spec": spec,
        }
    )


def claim(cluster: Cluster, namespace: str, name: str) -> None:
    """A PersistentVolumeClaim that many pods mount, of the default StorageClass unless the cluster
    is the local one.
    """
    mode = "ReadWriteMany" if len(cluster.items("nodes")) > 1 else "ReadWriteOnce"
    spec: dict[str, Any] = {"accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}}
    if cluster.is_local:
        # One folder of made models for the whole session.
        volume(cluster, namespace, name, folder="cache" if name == "cache" else "")
        spec["volumeName"] = f"{namespace}-{name}"
    metadata = {"name": name, "namespace": namespace}
    cluster.apply(
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}
    )


def small_job(name: str, steps: int = ENDLESS, **changes: Any) -> dict[str, Any]:
    """The arithmetic job with the transformers engine and small steps. `changes` are laid over
    spec, sections key by key.
    """
    job: dict[str, Any] = yaml.safe_load(ARITHMETIC.read_text())
    job["metadata"]["name"] = name
    spec = job["spec"]
    spec["model"]["cache"] = {"pvc": "cache"}
    spec["algorithm"] |= {"steps": steps, "groupsPerStep": 4}
    spec["actors"] |= {
        "generator": {"engine": "transformers", "maxRunningRequests": 16},
        "drainSeconds": 2,
    }
    spec["trainers"]["checkpoint"] = {"everySteps": 5, "pvc": "checkpoints"}
    spec["weightTransfer"] |= {"formTimeoutSeconds": 30, "syncTimeoutSeconds": 20}
    spec["failurePolicy"] = {"backoff": {"initialSeconds": 1, "maxSeconds": 5}, "maxRestarts": 50}
    return merged(job, {"spec": changes})


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid over `base`, mapping by mapping."""
    result = copy.deepcopy(dict(base))
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


@dataclass
class ClusterJob:
    """One PipelineRLJob in a cluster, used through kubectl."""

    cluster: Cluster
    namespace: str
    manifest: dict[str, Any] = field(repr=False)

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    def kubectl(self, *arguments: str, **options: Any) -> str:
        return self.cluster.kubectl("--namespace", self.namespace, *arguments, **options)

    def apply(self) -> "ClusterJob":
        self.kubectl("apply", "--filename", "-", stdin=yaml.safe_dump(self.manifest))
        return self

    def patch(self, **spec: Any) -> None:
        self.kubectl(
            "patch", "prl", self.name, "--type", "merge", "--patch", yaml.safe_dump({"spec": spec})
        )

    def delete(self, *flags: str) -> None:
        self.kubectl("delete", "prl", self.name, "--ignore-not-found", *flags, timeout_s=120)

    @property
    def object(self) -> dict[str, Any] | None:
        return self.cluster.get("prl", self.name, "--namespace", self.namespace)

    @property
    def status(self) -> dict[str, Any]:
        return dict((self.object or {}).get("status") or {})

    @property
    def phase(self) -> str:
        return str(self.status.get("phase", ""))

    @property
    def step(self) -> int:
        return int((self.status.get("training") or {}).get("step", 0))

    def condition(self, type_: str) -> dict[str, Any]:
        return next(
            (each for each in self.status.get("conditions", []) if each["type"] == type_), {}
        )

    def pods(self, role: str = "") -> list[dict[str, Any]]:
        """Pods of the job that are not being deleted."""
        selector = f"pipelinerl.dev/job={self.name}" + (
            f",pipelinerl.dev/role={role}" if role else ""
        )
        found = self.cluster.items("pods", "--namespace", self.namespace, "--selector", selector)
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def uids(self, *roles: str) -> dict[str, str]:
        """UID by name of the pods of these roles, or of all."""
        return {
            pod["metadata"]["name"]: pod["metadata"]["uid"]
            for pod in self.pods()
            if not roles or pod["metadata"]["labels"]["pipelinerl.dev/role"] in roles
        }

    def events(self) -> dict[str, list[str]]:
        """Messages of the job's own events, by reason."""
        found: dict[str, list[str]] = {}
        for event in self.cluster.items("events", "--namespace", self.namespace):
            if event["involvedObject"].get("name") == self.name:
                found.setdefault(event["reason"], []).append(event["message"])
        return found

    def wait_for_phase(self, *phases: str, timeout_s: float = READY_S) -> None:
        wait_for(
            f"phase {' or '.join(phases)} of {self.name}",
            lambda: self.phase in phases,
            timeout_s,
            lambda: self.status,
        )

    def wait_until_training(self, steps: int = 2, timeout_s: float = READY_S) -> int:
        """Waits for Running and for `steps` more steps than now; returns the step."""
        self.wait_for_phase("Running", timeout_s=timeout_s)
        first = self.step
        wait_for(
            f"step {first + steps} of {self.name}",
            lambda: self.step >= first + steps,
            timeout_s,
            lambda: self.status,
        )
        return self.step
