"""What a rule says."""

from collections.abc import Mapping
from dataclasses import dataclass

from pipelinerl_common.judgements import Severity

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
