"""What an alert is."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

RUNBOOKS: Final = "@runbooksUrl@"
"""Place holder for where docs/pages/how-to/runbooks.md is published: a value of the chart, like the
thresholds.
"""

BY_JOB: Final = "by (namespace, job)"
"""A job by its name and, in a cluster, its namespace; without one the label is simply not there."""


class Severity(StrEnum):
    CRITICAL = "critical"
    """Somebody should look now: the run does not learn, or loses work."""
    WARNING = "warning"
    """Somebody should look today: time, tokens or stability are lost."""


Series = Mapping[str, str]
"""Values of series minute by minute in promtool's notation: {'pipelinerl_ess{job="sums"}':
"0.9x60"}.
"""


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert. `@name@` in its texts stands for the threshold `name`."""

    name: str
    severity: Severity
    expr: str
    """What is true when it fires; its value is the number that the description shows."""
    hold: str
    """`for`: how long it must have been true. Example: "10m"."""
    summary: str
    description: str
    """With the number, as `{{ $value | humanize }}`, and the threshold."""
    fires: Series
    """For the test: what makes it fire within `TEST_MINUTES`."""
    quiet: Series
    """For the test: what is close and does not."""
    thresholds: Mapping[str, float] | None = None
    """Defaults by name; values of the chart, `prometheusRule.thresholds.<name>`."""

    @property
    def runbook_url(self) -> str:
        return f"{RUNBOOKS}#{self.name.lower()}"


TEST_MINUTES: Final = 180
"""How far the tests' series go."""


def with_thresholds(text: str, values: Mapping[str, float | str]) -> str:
    """`text` with its place holders filled, as the chart's templates do it."""
    for name, value in values.items():
        text = text.replace(f"@{name}@", value if isinstance(value, str) else f"{value:g}")
    return text
