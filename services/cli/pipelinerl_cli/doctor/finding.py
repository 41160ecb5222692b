"""What a rule says."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """In the order in which findings are shown."""

    CRITICAL = "critical"
    """The run does not learn, or not what it should."""
    WARNING = "warning"
    """Time, tokens or stability are lost."""
    ADVICE = "advice"
    """Worth a look."""


SEVERITIES = tuple(Severity)


@dataclass(frozen=True, slots=True)
class Finding:
    """Example: Finding(WARNING, "the trainer waits 43 % of its time", ("actors.replicas: more",),
    {"wait_share": 0.43}).
    """

    severity: Severity
    message: str
    turn: tuple[str, ...]
    """Parameters of the job file to turn, and how; the most promising first."""
    numbers: Mapping[str, float]
    """What the finding rests on."""
