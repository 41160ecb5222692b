"""Every alert fires when it should and is quiet when it should be, in promtool; the runbooks and
the chart know all of them.
"""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from monitoring.alert import TEST_MINUTES, Alert, Series, with_thresholds
from monitoring.files import ALERTS, CHART, GROUPS, grafana_rules, prometheus_rules, thresholds
from pipelinerl_common.metrics import CATALOG

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool: apt-get install prometheus"
)

FILLED: dict[str, float | str] = {
    **thresholds(),
    "runbooksUrl": "https://docs.example/how-to/runbooks.md",
}


def promtool(*arguments: str, folder: Path) -> str:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *arguments], cwd=folder, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def case(alert: Alert, series: Series, fires: bool) -> dict[str, Any]:
    """The alert fires in at least one of the minutes of the last hour, or in none of them."""
    expr = f'max_over_time((count(ALERTS{{alertname="{alert.name}",alertstate="firing"}}))[1h:1m])'
    return {
        "name": f"{alert.name} {'fires' if fires else 'is quiet'}",
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": expr,
                "eval_time": f"{TEST_MINUTES}m",
                "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
            }
        ],
    }


@needs_promtool
@pytest.mark.parametrize("group", GROUPS)
def test_every_alert_fires_and_is_quiet_where_it_should(tmp_path: Path, group: str) -> None:
    rules = [each for each in prometheus_rules()["groups"] if each["name"] == f"pipelinerl-{group}"]
    (tmp_path / "rules.yaml").write_text(with_thresholds(yaml.safe_dump({"groups": rules}), FILLED))
    assert f"{len(GROUPS[group])} rules found" in promtool(
        "check", "rules", "rules.yaml", folder=tmp_path
    )
    cases = [
        case(alert, series, fires)
        for alert in GROUPS[group]
        for series, fires in ((alert.fires, True), (alert.quiet, False))
    ]
    tests = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": cases}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests, sort_keys=False))
    promtool("test", "rules", "tests.yaml", folder=tmp_path)


@needs_promtool
def test_a_description_shows_the_number_and_the_limit(tmp_path: Path) -> None:
    rules = with_thresholds(
        yaml.safe_dump(prometheus_rules()),
        {**thresholds(), "runbooksUrl": "https://docs.example/how-to/runbooks.md"},
    )
    (tmp_path / "rules.yaml").write_text(rules)
    annotations = {
        "summary": "The effective sample size of sums is low",
        "description": "The effective sample size of sums is 40% of the batch, averaged over 10 "
        "minutes (limit 0.5). Importance weights differ so much that few tokens decide the step.",
        "remedy": "staleness.eta: lower; algorithm.groupsPerStep: higher; actors.replicas: fewer; "
        "algorithm.optimizer.learningRate: lower",
        "runbook_url": "https://docs.example/how-to/runbooks.md#pipelinerlesslow",
    }
    test = {
        "interval": "1m",
        "input_series": [
            {"series": 'pipelinerl_ess{job="sums",namespace="lab"}', "values": "0.4x60"}
        ],
        "alert_rule_test": [
            {
                "alertname": "PipelineRLEssLow",
                "eval_time": "30m",
                "exp_alerts": [
                    {
                        # The alert watches the second level of ESS, which is critical: below it
                        # the run does not learn what it should (common.judgements).
                        "exp_labels": {"severity": "critical", "job": "sums", "namespace": "lab"},
                        "exp_annotations": annotations,
                    }
                ],
            }
        ],
    }
    (tmp_path / "tests.yaml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": [test]})
    )
    promtool("test", "rules", "tests.yaml", folder=tmp_path)


def test_alerts_ask_for_metrics_that_exist() -> None:
    known = {metric.series for metric in CATALOG.values()}
    for alert in ALERTS:
        named = set(
            re.findall(r"pipelinerl_\w+", " ".join((alert.expr, *alert.fires, *alert.quiet)))
        )
        assert named, alert.name
        assert named <= known, alert.name


def test_every_place_holder_has_a_default_and_every_default_a_place() -> None:
    used = set(re.findall(r"@(\w+)@", " ".join(alert.expr for alert in ALERTS)))
    assert used == set(thresholds())
    described = {alert.name: set(re.findall(r"@(\w+)@", alert.expr)) for alert in ALERTS}
    for alert in ALERTS:
        assert set(alert.default) == described[alert.name]
        assert all(f"@{name}@" in alert.number for name in alert.default), alert.name


def test_every_alert_has_its_section_in_the_runbooks() -> None:
    text = (CHART.parents[1] / "docs/pages/how-to/runbooks.md").read_text(encoding="utf-8")
    sections = re.split(r"^### ", text, flags=re.MULTILINE)[1:]
    by_name = {section.partition("\n")[0]: section for section in sections}
    assert set(by_name) == {alert.name for alert in ALERTS}
    for name, section in by_name.items():
        for part in ("**Means**", "**Causes**", "**Do**"):
            assert part in section, name


def test_the_charts_values_have_the_defaults() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert values["prometheusRule"]["thresholds"] == thresholds()


def test_grafana_gets_the_same_alerts() -> None:
    rules = [rule for group in grafana_rules()["groups"] for rule in group["rules"]]
    assert [rule["title"] for rule in rules] == [alert.name for alert in ALERTS]
    assert [rule["data"][0]["model"]["expr"] for rule in rules] == [alert.expr for alert in ALERTS]
    assert len({rule["uid"] for rule in rules}) == len(rules)
    assert all(len(rule["uid"]) <= 40 for rule in rules)
    assert "$value " not in yaml.safe_dump(grafana_rules())
