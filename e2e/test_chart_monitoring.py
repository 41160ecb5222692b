"""The chart's alerts and dashboards as Helm renders them."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from monitoring.files import ALERTS, DASHBOARDS
from test_chart_render import HELM, of_kind, refusal, render

pytestmark = pytest.mark.skipif(
    not HELM.exists(), reason=f"no Helm at {HELM}: bash e2e/cluster/tools fetches it"
)

DOCS = "docsUrl=https://docs.example/0.1"


def test_rules_have_the_values_limits_and_are_valid(tmp_path: Path) -> None:
    sets = ("prometheusRule.enabled=true", "prometheusRule.thresholds.ess=0.25", DOCS)
    (rule,) = of_kind(render(*sets), "PrometheusRule")
    rules = {each["alert"]: each for group in rule["spec"]["groups"] for each in group["rules"]}
    assert set(rules) == {alert.name for alert in ALERTS}
    low = rules["PipelineRLEssLow"]
    assert low["expr"].endswith("< 0.25")
    assert "(limit 0.25)" in low["annotations"]["description"]
    assert "{{ $labels.job }}" in low["annotations"]["description"]
    assert (
        low["annotations"]["runbook_url"]
        == "https://docs.example/0.1/how-to/runbooks.md#pipelinerlesslow"
    )
    assert "@" not in yaml.safe_dump(rule["spec"])
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool: apt-get install prometheus")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rule["spec"]))
    checked = subprocess.run(
        [promtool, "check", "rules", str(tmp_path / "rules.yaml")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert checked.returncode == 0, checked.stderr


def test_dashboards_are_config_maps_for_the_sidecar() -> None:
    maps = of_kind(
        render("grafana.dashboards.enabled=true", "grafana.dashboards.namespace=monitoring", DOCS),
        "ConfigMap",
    )
    found = {
        each["metadata"]["name"].rpartition("-")[2]: each
        for each in maps
        if "-dashboard-" in each["metadata"]["name"]
    }
    assert set(found) == set(DASHBOARDS)
    for each in found.values():
        assert each["metadata"]["namespace"] == "monitoring"
        assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert each["metadata"]["annotations"] == {"grafana_folder": "PipelineRL"}
        ((name, text),) = each["data"].items()
        assert name.endswith(".json")
        assert (
            json.loads(text)["links"][0]["url"]
            == "https://docs.example/0.1/explanation/staleness.md"
        )
        assert not re.search(r"@\w+@", text)


def test_without_an_address_of_the_docs_no_dashboard_links_to_them() -> None:
    maps = of_kind(render("grafana.dashboards.enabled=true"), "ConfigMap")
    texts = [
        text
        for each in maps
        if "-dashboard-" in each["metadata"]["name"]
        for text in each["data"].values()
    ]
    assert len(texts) == len(DASHBOARDS)
    assert all(
        [link["type"] for link in json.loads(text)["links"]] == ["dashboards"] for text in texts
    )


def test_grafanas_own_alerts_name_the_data_source() -> None:
    sets = ("grafana.alerts.enabled=true", "grafana.alerts.datasourceUid=mimir", DOCS)
    (config,) = [
        each
        for each in of_kind(render(*sets), "ConfigMap")
        if each["metadata"]["name"].endswith("-alerts")
    ]
    assert config["metadata"]["labels"]["grafana_alert"] == "1"
    document = yaml.safe_load(config["data"]["pipelinerl-alerts.yaml"])
    rules = [rule for group in document["groups"] for rule in group["rules"]]
    assert [rule["title"] for rule in rules] == [alert.name for alert in ALERTS]
    assert {data["datasourceUid"] for rule in rules for data in rule["data"]} == {
        "mimir",
        "__expr__",
    }


def test_pods_of_jobs_are_scraped_in_the_watched_namespaces() -> None:
    (everywhere,) = of_kind(render("metrics.podMonitor.enabled=true"), "PodMonitor")
    assert everywhere["spec"]["namespaceSelector"] == {"any": True}
    assert everywhere["spec"]["podMetricsEndpoints"][0]["honorLabels"] is True
    (some,) = of_kind(
        render("metrics.podMonitor.enabled=true", "watchNamespaces={lab}"), "PodMonitor"
    )
    assert some["spec"]["namespaceSelector"] == {"matchNames": ["lab"]}


def test_what_the_operator_says_of_a_job_keeps_the_jobs_name_and_namespace() -> None:
    (monitor,) = of_kind(render("metrics.serviceMonitor.enabled=true"), "ServiceMonitor")
    assert [endpoint["honorLabels"] for endpoint in monitor["spec"]["endpoints"]] == [True]


def test_a_limit_that_no_alert_has_is_refused() -> None:
    assert "additional properties 'es' not allowed" in refusal("prometheusRule.thresholds.es=1")
