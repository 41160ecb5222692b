"""The alerts as Prometheus and as Grafana want them. Place holders stay in: the chart's templates
fill them from its values.
"""

from typing import Any, Final

from monitoring.alerts import ALERTS, GROUPS
from monitoring.alerts.alert import Alert

INTERVAL: Final = "30s"
FOLDER: Final = "PipelineRL"
_LOOK_BACK_S: Final = 600
_EXPRESSION: Final = "__expr__"
"""Grafana's name for expressions over other queries' results."""


def thresholds() -> dict[str, float]:
    """Defaults of all thresholds by name. Raises ValueError when two alerts use one name."""
    found: dict[str, float] = {}
    for alert in ALERTS:
        for name, value in (alert.thresholds or {}).items():
            if name in found:
                raise ValueError(f"{alert.name}: the threshold {name} belongs to another alert")
            found[name] = value
    return found


def prometheus_rules() -> dict[str, Any]:
    """`spec` of a PrometheusRule, which is also a rule file of Prometheus."""
    return {
        "groups": [
            {"name": f"pipelinerl-{name}", "rules": [_prometheus(alert) for alert in group]}
            for name, group in GROUPS.items()
        ]
    }


def _prometheus(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expr,
        "for": alert.hold,
        "labels": {"severity": alert.severity.value},
        "annotations": _annotations(alert),
    }


def grafana_rules() -> dict[str, Any]:
    """A provisioning file of Grafana. Its annotations are taken as they are, unlike labels:
    `$labels` needs no escaping.
    """
    groups = [
        {
            "orgId": 1,
            "name": f"pipelinerl-{name}",
            "folder": FOLDER,
            "interval": INTERVAL,
            "rules": [_grafana(alert) for alert in group],
        }
        for name, group in GROUPS.items()
    ]
    return {"apiVersion": 1, "groups": groups}


def _grafana(alert: Alert) -> dict[str, Any]:
    """The query keeps only series that are beyond their limit: B is 1 for each, whatever its value,
    0 included.
    """
    query = {"refId": "A", "expr": alert.expr, "instant": True, "range": False}
    condition = {
        "refId": "B",
        "type": "math",
        "expression": "is_number($A) || is_nan($A)",
    }
    return {
        "uid": alert.name.lower(),
        "title": alert.name,
        "condition": "B",
        "for": alert.hold,
        "noDataState": "OK",
        "execErrState": "Error",
        "labels": {"severity": alert.severity.value},
        "annotations": {
            key: text.replace("$value", "$values.A.Value")
            for key, text in _annotations(alert).items()
        },
        "data": [_data("A", "@datasourceUid@", query), _data("B", _EXPRESSION, condition)],
    }


def _data(ref: str, source: str, model: dict[str, Any]) -> dict[str, Any]:
    return {
        "refId": ref,
        "relativeTimeRange": {"from": _LOOK_BACK_S, "to": 0},
        "datasourceUid": source,
        "model": model,
    }


def _annotations(alert: Alert) -> dict[str, str]:
    return {
        "summary": alert.summary,
        "description": alert.description,
        "runbook_url": alert.runbook_url,
    }
