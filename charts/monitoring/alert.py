"""An alert: a query, the judgement whose limit it watches, and series on which it must fire."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pipelinerl_common.judgements import Judgement, Severity

RUNBOOKS: Final = "@runbooksUrl@"
"""Placeholder for the runbooks' address, which the chart makes from `docsUrl`."""

BY_JOB: Final = "by (namespace, job)"
"""Groups by a job's name and, in a cluster, its namespace; outside one that label is missing."""

Series = Mapping[str, str]
"""Values of series minute by minute in promtool's notation: {'pipelinerl_ess{job="sums"}':
"0.9x60"}.
"""


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert. `@name@` in its texts stands for the threshold `name`."""

    name: str
    judgement: Judgement | Severity
    """The judgement that it watches; only a severity where `expr` contains no limit."""
    expr: str
    """The query: true when the alert fires; its value is the number in the description."""
    hold: str
    """`for`: how long `expr` must have been true. Example: "10m"."""
    summary: str
    number: str
    """The sentence with the number, as `{{ $value | humanize }}`, and the threshold."""
    fires: Series
    """Series on which it must fire within `TEST_MINUTES`, for the test."""
    quiet: Series
    """Series that come close and on which it must not fire, for the test."""
    threshold: str = ""
    """Name of the chart's value for the limit, `prometheusRule.thresholds.<name>`, if it has one.
    """

    @property
    def severity(self) -> Severity:
        if isinstance(self.judgement, Severity):
            return self.judgement
        return self.judgement.alarm_severity or self.judgement.severity

    @property
    def default(self) -> dict[str, float]:
        """The default of the threshold by its name; empty for an alert without one."""
        if isinstance(self.judgement, Severity) or not self.threshold:
            return {}
        return {self.threshold: self.judgement.alarm_limit}

    @property
    def annotations(self) -> dict[str, str]:
        """The texts that Prometheus and Grafana show and send."""
        found = {"summary": self.summary, "description": self.number}
        if isinstance(self.judgement, Judgement):
            meaning = self.judgement.meaning
            found["description"] += f" {meaning[0].upper()}{meaning[1:]}."
            if self.judgement.remedies:
                found["remedy"] = "; ".join(self.judgement.remedies)
        return {**found, "runbook_url": f"{RUNBOOKS}#{self.name.lower()}"}


TEST_MINUTES: Final = 180
"""Length of the tests' series in minutes."""


def with_thresholds(text: str, values: Mapping[str, float | str]) -> str:
    """`text` with its place holders filled, as the chart's templates fill them."""
    for name, value in values.items():
        text = text.replace(f"@{name}@", value if isinstance(value, str) else f"{value:g}")
    return text
