"""What the evaluator found, from its records: one set at one step is one `Evaluated`."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipelinerl_cli.runs.records import Record
from pipelinerl_common.metrics import EVALUATOR

_PASS = re.compile(r"^evaluation_pass_ratio\{set=([^,}]+),k=(\d+)\}$")


@dataclass(frozen=True, slots=True)
class Interval:
    """Example: Interval(0.81, 0.76, 0.85): a mean over prompts with its 95 % interval."""

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
    step: int
    name: str
    """Of the set."""
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
    """Of the record of a step, one for each set that has a result."""
    passes: dict[str, dict[int, Interval]] = {}
    for name in record.values:
        if found := _PASS.match(name):
            of_k = f"{{set={found[1]},k={found[2]}}}"
            passes.setdefault(found[1], {})[int(found[2])] = _interval(
                record, "evaluation_pass_ratio", of_k, mean=""
            )
    return [
        _of_set(record, name, dict(sorted(pass_at.items()))) for name, pass_at in passes.items()
    ]


def evaluations(records: Iterable[Record]) -> Evaluations:
    """Of a step that was evaluated twice the last counts."""
    found: dict[tuple[str, int], Evaluated] = {}
    for record in records:
        if is_evaluation(record):
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
    parts = [
        f"{each.name} {', '.join([*_passes(each), f'reward {each.reward.mean:.3f}'])}"
        for each in evaluated(record)
    ]
    if num_failed := int(record.values.get("evaluation_sets_failed", 0)):
        parts.append(f"{num_failed} set(s) failed, see logs/{record.instance}.log")
    return f"step {record.step} evaluated: {'; '.join(parts)}"


def _passes(each: Evaluated) -> list[str]:
    return [f"pass@{k} {interval}" for k, interval in each.pass_at.items()]


def _of_set(record: Record, name: str, pass_at: Mapping[int, Interval]) -> Evaluated:
    of_set = f"{{set={name}}}"
    value = record.values.get
    return Evaluated(
        step=record.step,
        name=name,
        pass_at=pass_at,
        reward=_interval(record, "evaluation_reward", of_set, mean="_mean"),
        tokens_mean=value(f"evaluation_tokens_mean{of_set}", math.nan),
        truncated_ratio=value(f"evaluation_truncated_ratio{of_set}", math.nan),
        num_prompts=int(value(f"evaluation_prompts{of_set}", 0)),
    )


def _interval(record: Record, name: str, labels: str, *, mean: str) -> Interval:
    return Interval(
        *(record.values.get(f"{name}{edge}{labels}", math.nan) for edge in (mean, "_low", "_high"))
    )
