"""The evaluator's results, from its records: one set at one step is one `Evaluated`."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipelinerl_common.metrics import EVALUATOR
from pipelinerl_common.runs.records import Record

_PASS = re.compile(r"^evaluation_pass_ratio\{set=([^,}]+),k=(\d+)\}$")


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over prompts with its 95 % interval. Example: Interval(0.81, 0.76, 0.85)."""

    mean: float
    low: float
    high: float

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, (self.mean, self.low, self.high)))

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The result of one evaluation set at one step."""

    step: int
    name: str
    """The set's name."""
    pass_at: Mapping[int, Interval]
    """By k, ascending."""
    reward: Interval
    tokens_mean: float
    truncated_ratio: float
    num_prompts: int


Evaluations = Mapping[str, list[Evaluated]]
"""By set, in order of steps."""


def is_evaluation(record: Record) -> bool:
    """Whether it holds the results of a step."""
    return record.role == EVALUATOR and record.step >= 0


def evaluated(record: Record) -> list[Evaluated]:
    """The results in one step's record, one for each set that has one."""
    passes: dict[str, dict[int, Interval]] = {}
    for found in filter(None, map(_PASS.match, record.values)):
        name, k = found[1], int(found[2])
        interval = _interval(record, "evaluation_pass_ratio", f"{{set={name},k={k}}}", mean="")
        passes.setdefault(name, {})[k] = interval
    return [_of_set(record, name, dict(sorted(each.items()))) for name, each in passes.items()]


def evaluations(records: Iterable[Record]) -> Evaluations:
    """The results of a run. The last one counts for a step that was evaluated twice."""
    found: dict[tuple[str, int], Evaluated] = {}
    for record in filter(is_evaluation, records):
        found |= {(each.name, each.step): each for each in evaluated(record)}
    by_set: dict[str, list[Evaluated]] = {}
    for _, each in sorted(found.items(), key=lambda item: item[0][1]):
        by_set.setdefault(each.name, []).append(each)
    return by_set


def evaluation_line(record: Record) -> str | None:
    """A result in one line, None for other records.

    Example: "step 20 evaluated: held-out pass@1 0.812 (0.766 to 0.853), reward 0.812".
    """
    if not is_evaluation(record):
        return None
    parts = []
    for each in evaluated(record):
        passes = [f"pass@{k} {interval}" for k, interval in each.pass_at.items()]
        parts.append(f"{each.name} {', '.join([*passes, f'reward {each.reward.mean:.3f}'])}")
    if num_failed := int(record.values.get("evaluation_sets_failed", 0)):
        parts.append(f"{num_failed} set(s) failed, see logs/{record.instance}.log")
    return f"step {record.step} evaluated: {'; '.join(parts)}"


def _of_set(record: Record, name: str, pass_at: Mapping[int, Interval]) -> Evaluated:
    labels = f"{{set={name}}}"
    value = record.values.get
    return Evaluated(
        step=record.step,
        name=name,
        pass_at=pass_at,
        reward=_interval(record, "evaluation_reward", labels, mean="_mean"),
        tokens_mean=value(f"evaluation_tokens_mean{labels}", math.nan),
        truncated_ratio=value(f"evaluation_truncated_ratio{labels}", math.nan),
        num_prompts=int(value(f"evaluation_prompts{labels}", 0)),
    )


def _interval(record: Record, name: str, labels: str, *, mean: str) -> Interval:
    edges = (f"{name}{edge}{labels}" for edge in (mean, "_low", "_high"))
    return Interval(*(record.values.get(edge, math.nan) for edge in edges))
