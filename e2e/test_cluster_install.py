"""On a real cluster: installation, the example job, its status for users, and its pods' rights."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster_job import ARITHMETIC, ClusterJob
from cluster_release import NAMESPACE, Release
from cluster_session import Cluster, wait_for

CRD = "pipelinerljobs.pipelinerl.dev"

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def arithmetic(cluster: Cluster, new_namespace: Callable[[str], str]) -> Iterator[ClusterJob]:
    """e2e/jobs/arithmetic.yaml as it is, applied as its users apply it."""
    namespace = new_namespace("arithmetic")
    cluster.kubectl("--namespace", namespace, "apply", "--filename", str(ARITHMETIC))
    job = ClusterJob(cluster, namespace, yaml.safe_load(ARITHMETIC.read_text()))
    yield job
    job.delete("--wait=false")


def test_helm_test_finds_the_release_well(cluster: Cluster, release: Release) -> None:
    output = cluster.helm(
        "test", "prl", "--namespace", NAMESPACE, "--logs", "--timeout", "150s", check=False
    )
    assert output.count("ok    ") == 4, output
    assert "WRONG" not in output


def test_one_replica_of_the_operator_leads_and_both_are_ready(
    cluster: Cluster, release: Release
) -> None:
    leader = release.leader()
    pods = release.pods("app.kubernetes.io/component=operator")
    assert len(pods) == 2
    assert leader in {pod["metadata"]["name"] for pod in pods}
    assert len(release.pods("pipelinerl.dev/leader=true")) == 1


def test_kubectl_explains_the_job(cluster: Cluster, release: Release, tmp_path: Path) -> None:
    crd = yaml.safe_load(cluster.kubectl("get", "crd", CRD, "--output", "yaml"))
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for path in ("spec.algorithm.steps", "spec.network.rdma", "status.phase"):
        field = schema
        for name in path.split("."):
            field = field["properties"][name]
        # A cache of its own: `explain` uses one from before the installation.
        answer = cluster.kubectl("explain", f"prl.{path}", "--cache-dir", str(tmp_path))
        assert " ".join(field["description"].split()) in " ".join(answer.split())


def test_the_pods_of_a_job_are_restricted(arithmetic: ClusterJob) -> None:
    pods = wait_for(
        "three pods",
        lambda: found if len(found := arithmetic.pods()) == 3 else None,
        60,
        arithmetic.pods,
    )
    for pod in pods:
        assert violations(pod["spec"]) == []


def violations(spec: dict[str, Any]) -> list[str]:
    """The violations of the pod security level `restricted`."""
    found = [
        f"{field} is set" for field in ("hostNetwork", "hostPID", "hostIPC") if spec.get(field)
    ]
    allowed = {
        "configMap",
        "secret",
        "emptyDir",
        "persistentVolumeClaim",
        "projected",
        "downwardAPI",
        "csi",
        "ephemeral",
    }
    found += [
        f"volume {each['name']}" for each in spec.get("volumes", []) if not allowed & set(each)
    ]
    if spec.get("automountServiceAccountToken", True):
        found.append("a token of the API server is mounted")
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        security = {**spec.get("securityContext", {}), **container.get("securityContext", {})}
        name = container["name"]
        if security.get("allowPrivilegeEscalation", True) or security.get("privileged"):
            found.append(f"{name}: privileges")
        if not security.get("runAsNonRoot") or security.get("runAsUser") == 0:
            found.append(f"{name}: root")
        if security.get("capabilities", {}).get("drop") != ["ALL"] or security["capabilities"].get(
            "add"
        ):
            found.append(f"{name}: capabilities")
        if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            found.append(f"{name}: seccomp")
        if not security.get("readOnlyRootFilesystem"):
            found.append(f"{name}: writable root file system")
    return found


def test_the_example_job_learns_and_succeeds(arithmetic: ClusterJob) -> None:
    arithmetic.wait_for_phase("Running", "Succeeded", timeout_s=400)
    arithmetic.wait_for_phase("Succeeded", "Failed", timeout_s=500)
    status = arithmetic.status
    assert status["phase"] == "Succeeded", status
    assert status["training"]["step"] == 60
    assert status["training"]["reward"] >= 0.8  # from about 0.2
    assert status["restarts"] == 0
    assert arithmetic.condition("Succeeded")["status"] == "True"
    assert arithmetic.condition("Succeeded")["observedGeneration"] == 1
    assert {"Running", "Succeeded"} <= set(arithmetic.events())
    wait_for("end of the other pods", lambda: not arithmetic.pods("actor"), 90, arithmetic.pods)


def test_kubectl_get_shows_how_the_job_went(arithmetic: ClusterJob) -> None:
    header, row = arithmetic.kubectl("get", "prl").splitlines()
    assert header.split() == [
        "NAME",
        "PHASE",
        "STEP",
        "REWARD",
        "LAG",
        "ACTORS",
        "TRAINERS",
        "RESTARTS",
        "AGE",
    ]
    name, phase, step, reward, *_ = row.split()
    assert (name, phase, step) == ("arithmetic", "Succeeded", "60")
    assert float(reward) >= 0.8
