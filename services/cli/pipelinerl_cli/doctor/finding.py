"""Findings: what the doctor's rules return."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipelinerl_common.judgements import Judgement, Severity

SEVERITIES = tuple(Severity)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that slows a run down or makes it fail, and the settings that change it.

    Example: Finding(WARNING, "the trainer waits 43 % of its time", ("actors.replicas: more",),
    {"wait_share": 0.43}).
    """

    severity: Severity
    message: str
    turn: tuple[str, ...]
    """Settings of the job file to change, and how; the most promising first."""
    numbers: Mapping[str, float]
    """The numbers behind the finding."""


def judge(
    judgement: Judgement,
    value: float,
    message: str,
    numbers: Mapping[str, float],
    turn: Sequence[str] | None = None,
) -> Finding | None:
    """A finding when `value` is beyond the judgement's limit, with its severity, and with its
    remedies where `turn` has none of this run.
    """
    if not judgement.is_beyond(value):
        return None
    remedies = judgement.remedies if turn is None else tuple(turn)
    return Finding(judgement.severity_of(value), message, remedies, numbers)


class Named(NamedTuple):
    """A finding with the name of its rule."""

    rule: str
    finding: Finding
