"""The chart's NATS: a configuration that nats-server accepts, keys that stay in their Secrets, and
a cluster by one value.
"""

import base64
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cluster_release import CHART, older_chart
from pipelinerl_common.stream.server import find_binary
from pipelinerl_operator.nats import trust
from pipelinerl_operator.nats.trust import KeyKind, NatsKey
from test_chart_render import HELM, of_kind, refusal, render

pytestmark = pytest.mark.skipif(
    not HELM.exists(), reason=f"no Helm at {HELM}: bash e2e/cluster/tools fetches it"
)

NAME = "prl-pipelinerl-nats"


def server_of(documents: list[dict[str, Any]]) -> dict[str, Any]:
    (server,) = (
        each for each in of_kind(documents, "StatefulSet") if each["metadata"]["name"] == NAME
    )
    return server


def pod_of(documents: list[dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = server_of(documents)["spec"]["template"]["spec"]
    return spec


def environment_of(documents: list[dict[str, Any]], password: str) -> dict[str, str]:
    """The environment of the container, as the kubelet would set it."""
    variables = {
        each["name"]: each.get("value", "") for each in pod_of(documents)["containers"][0]["env"]
    }
    filled = {
        name: value.replace("$(ROUTE_PASSWORD)", password) for name, value in variables.items()
    }
    return (
        filled
        | {"POD_NAME": f"{NAME}-0"}
        | ({"ROUTE_PASSWORD": password} if "ROUTE_PASSWORD" in variables else {})
    )


def test_another_version_of_the_chart_restarts_no_server(tmp_path: Path) -> None:
    older, newer = (
        server_of(render("image.tag=a", chart=chart)) for chart in (older_chart(tmp_path), CHART)
    )
    assert older["metadata"]["labels"] != newer["metadata"]["labels"]
    assert older["spec"] == newer["spec"]
    assert server_of(render("image.tag=a", "nats.maxPayload=4MB"))["spec"] != newer["spec"]


@pytest.mark.parametrize("replicas", [1, 3, 5])
def test_the_server_takes_its_configuration(replicas: int, tmp_path: Path) -> None:
    documents = render(f"nats.replicas={replicas}")
    secret = trust.auth_secret(f"{NAME}-auth", NatsKey.generate(KeyKind.OPERATOR), {})
    content = {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}
    (config,) = (
        each for each in of_kind(documents, "ConfigMap") if each["metadata"]["name"] == NAME
    )
    text = (
        config["data"]["nats.conf"]
        .replace("/data", str(tmp_path / "data"))
        .replace("/run/nats", str(tmp_path))
    )
    (tmp_path / "nats.conf").write_text(text)
    (tmp_path / trust.CONFIG_KEY).write_text(content[trust.CONFIG_KEY])
    variables = environment_of(documents, content[trust.ROUTE_PASSWORD_KEY])
    assert sum(name.startswith("ROUTE_") and name != "ROUTE_PASSWORD" for name in variables) == (
        0 if replicas == 1 else replicas
    )
    checked = subprocess.run(
        [find_binary(), "-t", "--config", str(tmp_path / "nats.conf")],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr


def test_the_operators_seed_does_not_come_near_the_server() -> None:
    volumes = pod_of(render("nats.replicas=3"))["volumes"]
    (config,) = (volume["projected"] for volume in volumes if volume["name"] == "config")
    (secret,) = (source["secret"] for source in config["sources"] if "secret" in source)
    assert secret["items"] == [{"key": trust.CONFIG_KEY, "path": "auth.conf"}]
    assert [volume["name"] for volume in volumes if "secret" in volume] == []


def test_the_operator_may_make_its_one_secret_and_read_no_other_in_its_namespace() -> None:
    documents = render("watchNamespaces={team-a}")
    secrets = [
        (rule["verbs"], rule.get("resourceNames"))
        for role in of_kind(documents, "Role")
        if role["metadata"].get("namespace", "rl-system") == "rl-system"
        for rule in role["rules"]
        if "secrets" in rule["resources"]
    ]
    assert secrets == [(["create"], None), (["get"], [f"{NAME}-auth"])]


def test_servers_have_volumes_or_only_a_folder_of_the_pod() -> None:
    (claim,) = server_of(render())["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "40Gi"
    documents = render("nats.persistence.enabled=false", "nats.persistence.size=2Gi")
    assert "volumeClaimTemplates" not in server_of(documents)["spec"]
    assert {"name": "data", "emptyDir": {"sizeLimit": "2Gi"}} in pod_of(documents)["volumes"]


def test_a_cluster_loses_one_server_at_a_time_and_a_single_one_may_be_moved() -> None:
    assert not [
        each
        for each in of_kind(render(), "PodDisruptionBudget")
        if each["metadata"]["name"] == NAME
    ]
    (budget,) = (
        each
        for each in of_kind(render("nats.replicas=3"), "PodDisruptionBudget")
        if each["metadata"]["name"] == NAME
    )
    assert budget["spec"]["maxUnavailable"] == 1


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ("nats.replicas=2", "nats/replicas"),
        ("nats.jetstream.fileStore=36Gi", "nats/jetstream/fileStore"),
        ("nats.persistance.enabled=false", "nats"),
        ("externalNats.token=secret", "externalNats"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(value: str, field: str) -> None:
    assert f"/{field}" in refusal(value)
