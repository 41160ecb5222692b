"""The chart without a cluster: the objects that it renders for several values, and values that it
refuses.
"""

import difflib
import functools
import itertools
import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from bench.operator_jobs import MALLOC
from pipelinerl_operator.kube import resources

ROOT = Path(__file__).parents[1]
CHART = ROOT / "charts" / "pipelinerl"
GOLDEN = Path(__file__).parent / "golden"
HELM = (
    Path(os.environ.get("CLUSTER_CACHE", Path.home() / ".cache" / "local-kubernetes"))
    / "bin"
    / "helm"
)
NEWEST = kubernetes_validate.latest_version()

VALUES: dict[str, tuple[str, ...]] = {
    "default": (),
    "namespaced": (
        "watchNamespaces={team-a,team-b}",
        "rbac.aggregate=false",
        "rbac.gangScheduling=false",
    ),
    "registry": (
        "image.registry=registry.example.com/rl",
        "image.tag=1.2.3",
        "imagePullSecrets[0].name=pull",
    ),
    "external-nats": (
        "nats.enabled=false",
        "externalNats.url=nats://nats.messaging.svc:4222",
        "externalNats.credentialsSecret.name=nats-login",
        "externalNats.caSecret.name=nats-ca",
    ),
    "nats-cluster": ("nats.replicas=3",),
    "monitoring": (
        "metrics.serviceMonitor.enabled=true",
        "metrics.serviceMonitor.additionalLabels.release=prometheus",
    ),
    "bare": (
        "pdb.enabled=false",
        "networkPolicy.enabled=false",
        "operator.replicas=1",
        "crds.install=false",
        "tests.enabled=false",
    ),
}
"""Value sets by the name of their golden file."""

pytestmark = pytest.mark.skipif(
    not HELM.exists(), reason=f"no Helm at {HELM}: bash e2e/cluster/tools fetches it"
)


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(HELM), *arguments], capture_output=True, text=True, check=False, timeout=120
    )


@functools.cache
def render(
    *sets: str,
    release: str = "prl",
    namespace: str = "rl-system",
    version: str = "1.36",
    chart: Path = CHART,
) -> list[dict[str, Any]]:
    """The objects that `helm template` renders, cached; callers must not change them."""
    flags = [flag for each in sets for flag in ("--set", each)]
    result = helm(
        "template", release, str(chart), "--namespace", namespace, "--kube-version", version, *flags
    )
    assert result.returncode == 0, result.stderr
    return [
        document for document in yaml.load_all(result.stdout, Loader=yaml.CSafeLoader) if document
    ]


def refusal(*sets: str) -> str:
    flags = [flag for each in sets for flag in ("--set", each)]
    result = helm("template", "prl", str(CHART), *flags)
    assert result.returncode != 0, "the chart took the values"
    return result.stderr


def of_kind(documents: Iterable[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [document for document in documents if document["kind"] == kind]


def identity(document: dict[str, Any]) -> str:
    namespace = document["metadata"].get("namespace", "")
    return f"{document['apiVersion']} {document['kind']} {namespace}/{document['metadata']['name']}"


def test_the_chart_passes_helm_lint() -> None:
    result = helm("lint", "--strict", str(CHART))
    assert result.returncode == 0, result.stdout


def reviewed(documents: list[dict[str, Any]]) -> list[str]:
    """Names of everything, and the operator's own objects in full, as lines."""
    kinds = ("Deployment", "Role", "ClusterRole", "Service", "NetworkPolicy")
    operator = [each for each in documents if each["kind"] in kinds]
    text = (
        "\n".join(sorted(map(identity, documents)))
        + "\n---\n"
        + yaml.safe_dump_all(operator, sort_keys=False, width=120)
    )
    return text.splitlines(keepends=True)


@pytest.mark.parametrize("name", VALUES)
def test_what_is_rendered_is_what_was_reviewed(name: str) -> None:
    """The default is compared in full, other values by their differences from it.
    PIPELINERL_UPDATE_GOLDEN=1 writes the files again.
    """
    default = reviewed(render())
    if name == "default":
        file, text = GOLDEN / "chart.yaml", "".join(default)
    else:
        changes = difflib.unified_diff(
            default, reviewed(render(*VALUES[name])), "default", name, n=1
        )
        file, text = GOLDEN / f"chart-{name}.diff", "".join(changes)
    if os.environ.get("PIPELINERL_UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.parametrize("name", VALUES)
def test_everything_rendered_is_valid_for_the_newest_kubernetes(name: str) -> None:
    for document in render(*VALUES[name]):
        if (
            "monitoring.coreos.com" in document["apiVersion"]
            or document["kind"] == "CustomResourceDefinition"
        ):
            continue
        kubernetes_validate.validate(document, NEWEST, strict=True)


@pytest.mark.parametrize(
    ("version", "expected"),
    [("1.20", "policy/v1beta1"), ("1.21", "policy/v1"), ("1.36", "policy/v1")],
)
def test_disruption_budgets_are_of_the_version_that_the_server_has(
    version: str, expected: str
) -> None:
    assert {
        each["apiVersion"] for each in of_kind(render(version=version), "PodDisruptionBudget")
    } == {expected}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("operator.replica=3", "additional properties 'replica' not allowed"),
        ("operator.replicas=0", "minimum"),
        ("operator.replicas=two", "want integer"),
        ("operator.logLevel=loud", "must be one of 'debug', 'info', 'warning', 'error'"),
        ("image.pullPolicy=Sometimes", "must be one of 'Always', 'IfNotPresent', 'Never'"),
        ("operator.image.digest=latest", "does not match pattern"),
        ("watchNamespaces={Team_A}", "does not match pattern"),
        ("nats.enabled=false", "externalNats.url"),
        ("externalNats.url=nats://nats:4222", "set nats.enabled=false too"),
        ("image.registry=https://registry.example.com/rl", "does not match pattern"),
        ("fullnameOverride=Team_A", "does not match pattern"),
        ("nats.jetstream.fileStore=41GB", "is more than nats.persistence.size=40Gi"),
        ("nats.persistence.size=38G", "nats.jetstream.fileStore=36GB is more than"),
    ],
)
def test_wrong_values_are_refused_by_name(setting: str, message: str) -> None:
    answer = refusal(setting)
    assert message in answer
    field = setting.partition("=")[0]
    assert field.replace(".", "/").partition("[")[0].rsplit("/", 1)[0] in answer or field in answer


@pytest.mark.parametrize("namespaces", [(), ("watchNamespaces={team-a}",)])
def test_two_releases_live_in_one_namespace(namespaces: tuple[str, ...]) -> None:
    first, second = (
        set(map(identity, render(*namespaces, release=release))) for release in ("one", "two")
    )
    shared = {each for each in first & second if " CustomResourceDefinition " not in each}
    assert shared == set()


def test_releases_of_one_name_in_two_namespaces_share_nothing_cluster_wide() -> None:
    one, two = (render(namespace=namespace) for namespace in ("team-a", "team-b"))
    cluster_wide = {"ClusterRole", "ClusterRoleBinding"}
    first, second = (
        {identity(each) for each in documents if each["kind"] in cluster_wide}
        for documents in (one, two)
    )
    assert first
    assert first.isdisjoint(second)


def rights(rules: Iterable[dict[str, Any]]) -> dict[tuple[str, str], set[str]]:
    """Verbs by (group, resource)."""
    found: dict[tuple[str, str], set[str]] = {}
    for rule in rules:
        for group, resource in itertools.product(rule["apiGroups"], rule["resources"]):
            found.setdefault((group, resource), set()).update(rule["verbs"])
    return found


def wanted(*tables: tuple[resources.Permission, ...]) -> dict[tuple[str, str], set[str]]:
    return {(each.group, each.resource): set(each.verbs) for each in itertools.chain(*tables)}


def test_the_operators_rights_are_those_that_its_code_uses() -> None:
    documents = render()
    roles = {
        each["metadata"]["name"]: each["rules"]
        for each in documents
        if each["kind"] in ("Role", "ClusterRole")
    }
    own = [
        rule for name, rules in roles.items() if not name.startswith("rl-system-") for rule in rules
    ]
    assert rights(roles["rl-system-prl-pipelinerl"]) == wanted(
        resources.JOB_NAMESPACES, resources.GANG_NAMESPACES
    )
    assert rights(own) == wanted(resources.OWN_NAMESPACE)


def test_an_operator_of_some_namespaces_has_no_right_in_others() -> None:
    documents = render("watchNamespaces={team-a,team-b}", "rbac.aggregate=false")
    assert of_kind(documents, "ClusterRole") == of_kind(documents, "ClusterRoleBinding") == []
    roles = [each for each in of_kind(documents, "Role") if "namespace" in each["metadata"]]
    assert sorted(each["metadata"]["namespace"] for each in roles) == ["team-a", "team-b"]
    for role in roles:
        assert rights(role["rules"]) == wanted(resources.JOB_NAMESPACES, resources.GANG_NAMESPACES)


def test_every_pod_is_restricted() -> None:
    documents = render()
    pods = [
        each["spec"]["template"]["spec"]
        for each in documents
        if each["kind"] in ("Deployment", "StatefulSet")
    ]
    pods += [each["spec"] for each in of_kind(documents, "Pod")]
    assert len(pods) >= 2
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"] + pod.get("initContainers", []):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"]["drop"] == ["ALL"]
            assert security["readOnlyRootFilesystem"]


def test_the_operators_memory_is_measured_as_it_is_installed() -> None:
    operator = next(each for each in of_kind(render(), "Deployment"))
    [container] = operator["spec"]["template"]["spec"]["containers"]
    environment = {each["name"]: each.get("value") for each in container["env"]}
    assert environment.items() >= MALLOC.items()


def test_every_value_is_described_in_the_readme() -> None:
    readme = (CHART / "README.md").read_text()

    def leaves(prefix: str, value: Any) -> Iterable[str]:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                yield from leaves(f"{prefix}.{key}" if prefix else key, inner)
        else:
            yield prefix

    described: set[str] = set()
    before = ""
    for name in re.findall(
        r"`([A-Za-z.]+)`", readme
    ):  # `.labels` stands beside the value before it
        before = before.rpartition(".")[0] + name if name.startswith(".") else name
        described.add(before)
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    missing = [
        path
        for path in leaves("", values)
        if not any(path == each or path.startswith(f"{each}.") for each in described)
    ]
    assert missing == []
