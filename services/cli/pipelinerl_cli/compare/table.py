"""Runs side by side, in numbers."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from pipelinerl_cli.compare.runs import SMOOTHING, Compared, Variant
from pipelinerl_cli.report.svg import clock, compact
from pipelinerl_cli.run_folder import flat_settings
from pipelinerl_common.runs.history import Step

Form = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class TableRow:
    """One number of each run; None where the run has none."""

    name: str
    of: Callable[[Compared], float | None]
    form: Form = compact


def _summary(name: str, key: str, form: Form = compact) -> TableRow:
    return TableRow(name, lambda run: run.summary[key], form)


ROWS = (
    _summary("steps", "steps", "{:.0f}".format),
    _summary("time", "seconds", clock),
    _summary("training time", "training_seconds", clock),
    _summary("reward first", "reward_first"),
    _summary("reward last", "reward_last"),
    _summary("lag mean", "lag_mean"),
    _summary("lag max", "lag_max"),
    _summary("ESS mean", "ess_mean"),
    _summary("ESS least", "ess_min"),
    TableRow("trajectories/s", lambda run: run.trajectories_per_second),
    _summary("tokens/s", "tokens_per_second"),
    TableRow("trainer waits", lambda run: run.waiting_share, "{:.0%}".format),
    TableRow("generators full", lambda run: run.places_in_use, "{:.0%}".format),
    _summary("updates", "weight_updates", "{:.0f}".format),
)
REACHED: tuple[tuple[str, Callable[[Step], float], Form], ...] = (
    ("time", lambda step: step.t, clock),
    ("trajectories", lambda step: step.samples, compact),
    ("tokens", lambda step: step.tokens, compact),
)
"""What a reward is reached in: name, value, form."""

NOTE = (
    "Training time and times to a reward leave out the start-up of every session, up to its first "
    f"generated token. A reward is reached when the mean of {SMOOTHING} steps reaches it; a single "
    "step may have been above it."
)
SEVERAL = "Runs that differ in their seed only: mean (lowest to highest)."
SELECTED = (
    "The rewards of {} are of the groups that were trained: those of equal rewards were "
    "dropped (dropZeroAdvantage)."
)
"""Such a run's reward may never come near 1, however good the policy is."""

SECTIONS = ("task", "model", "algorithm", "actors", "trainers", "weightTransfer")
"""Sections of the job file that `differences` compares; the staleness policy and the seeds are rows
of the numbers' table.
"""
MAX_COLUMNS = 60
OTHER_TASKS = (
    "WARNING: the runs have different tasks (task.path or task.args), so that rewards "
    "and times to a reward are not comparable."
)


def differences(variants: Sequence[Variant]) -> list[list[str]]:
    """A row for each setting that differs: its path, and each variant's value, "-" where it has
    none.
    """
    settings = [flat_settings(variant.job) for variant in variants]
    paths = dict.fromkeys(path for each in settings for path in each)
    rows = {path: [each.get(path) for each in settings] for path in paths}
    return [
        [path, *map(_setting, values)]
        for section in SECTIONS
        for path, values in rows.items()
        if path.partition(".")[0] == section and any(value != values[0] for value in values)
    ]


def warning(variants: Sequence[Variant]) -> str:
    """Empty where all runs have one task."""
    tasks = [variant.job.spec.task for variant in variants]
    same = all((task.path, task.args) == (tasks[0].path, tasks[0].args) for task in tasks)
    return "" if same else OTHER_TASKS


def _setting(value: Any) -> str:
    if value is None:
        return "-"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_COLUMNS else f"{text[: MAX_COLUMNS - 3]}..."


def evaluated(variants: Sequence[Variant]) -> list[tuple[str, int]]:
    """Every (set, k) that one of the runs was evaluated on."""
    results = [
        each
        for variant in variants
        for run in variant.runs
        for found in run.history.evaluations.values()
        for each in found
    ]
    return sorted({(each.name, k) for each in results for k in each.pass_at})


def _evaluation(name: str, k: int) -> TableRow:
    return TableRow(f"{name} pass@{k}", lambda run: run.pass_at(name, k), "{:.3f}".format)


def note(variants: Sequence[Variant]) -> str:
    """Explains how the table is to be read."""
    parts = [NOTE]
    if any(len(variant.runs) > 1 for variant in variants):
        parts.append(SEVERAL)
    if selected := [each.label for each in variants if each.job.spec.algorithm.drop_zero_advantage]:
        parts.append(SELECTED.format(", ".join(selected)))
    return " ".join(parts)


def table(
    variants: Sequence[Variant], rewards: Sequence[float]
) -> tuple[list[str], list[list[str]]]:
    """The head and the rows: a column per variant and a row per number, so that any number of
    numbers fits.
    """
    seeds = [" ".join(str(run.job.spec.seed) for run in variant.runs) for variant in variants]
    body = [["policy", *(variant.policy for variant in variants)], ["seeds", *seeds]]
    for row in [*ROWS, *(_evaluation(name, k) for name, k in evaluated(variants))]:
        body.append(
            [row.name, *(cell(map(row.of, variant.runs), row.form) for variant in variants)]
        )
    for reward in rewards:
        for name, of, form in REACHED:
            cells = (_reached(variant, reward, of, form) for variant in variants)
            body.append([f"{name} to {reward:g}", *cells])
    return ["run", *(variant.label for variant in variants)], body


def cell(values: Iterable[float | None], form: Form) -> str:
    """Example: 0.8 of one run is "0.8"; 0.7 and 0.9 of two are "0.8 (0.7 to 0.9)"; without any it
    is "-".
    """
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    low, high = form(min(known)), form(max(known))
    return low if low == high else f"{form(fmean(known))} ({low} to {high})"


def _reached(variant: Variant, reward: float, of: Callable[[Step], float], form: Form) -> str:
    steps = [step for run in variant.runs if (step := run.first_reaching(reward)) is not None]
    if not steps:
        best = [run.best_reward for run in variant.runs if run.best_reward is not None]
        if not best:
            return f"fewer than {SMOOTHING} steps"
        return f"not reached, best {compact(max(best))}"
    shown = cell([of(step) for step in steps], form)
    if len(steps) == len(variant.runs):
        return shown
    return f"{shown}, {len(steps)} of {len(variant.runs)} runs"
