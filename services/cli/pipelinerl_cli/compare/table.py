"""Runs side by side, in numbers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from pipelinerl_cli.compare.runs import SMOOTHING, Compared, Variant
from pipelinerl_cli.report.charts import clock, compact
from pipelinerl_cli.runs.history import Step


def percent(share: float) -> str:
    return f"{share:.0%}"


@dataclass(frozen=True, slots=True)
class TableRow:
    """One number of each run; None where the run has none."""

    name: str
    of: Callable[[Compared], float | None]
    form: Callable[[float], str] = compact


def _summary(name: str, key: str, form: Callable[[float], str] = compact) -> TableRow:
    return TableRow(name, lambda run: run.summary[key], form)


ROWS = (
    _summary("steps", "steps", "{:.0f}".format),
    _summary("time", "seconds", clock),
    _summary("time training", "training_seconds", clock),
    _summary("reward first", "reward_first"),
    _summary("reward last", "reward_last"),
    _summary("lag mean", "lag_mean"),
    _summary("lag max", "lag_max"),
    _summary("ESS mean", "ess_mean"),
    _summary("ESS least", "ess_min"),
    TableRow("trajectories/s", lambda run: run.trajectories_per_second),
    _summary("tokens/s", "tokens_per_second"),
    TableRow("trainer waits", lambda run: run.waiting_share, percent),
    TableRow("generators full", lambda run: run.places_in_use, percent),
    _summary("updates", "weight_updates", "{:.0f}".format),
)

REACHED: tuple[tuple[str, Callable[[Step], float], Callable[[float], str]], ...] = (
    ("time", lambda step: step.t, clock),
    ("trajectories", lambda step: step.samples, compact),
    ("tokens", lambda step: step.tokens, compact),
)

NOTE = (
    "Time training and times to a reward leave out the start-up of every session, up to its first "
    "generated token. "
    f"A reward is reached when the mean of {SMOOTHING} steps is; a single step may have been above "
    "it."
)
SEVERAL = "Of runs that differ in their seed only: mean (lowest to highest)."
SELECTED = (
    "The rewards of {} are of the groups that were trained: those of equal rewards were "
    "dropped (dropZeroAdvantage)."
)
"""Such a run's reward may never come near 1, however good the policy is."""


def evaluated(variants: Sequence[Variant]) -> list[tuple[str, int]]:
    """Every (set, k) that one of the runs was evaluated on."""
    runs = [run for variant in variants for run in variant.runs]
    return sorted(
        {
            (name, k)
            for run in runs
            for name, found in run.history.evaluations.items()
            for each in found
            for k in each.pass_at
        }
    )


def _evaluation(name: str, k: int) -> TableRow:
    return TableRow(f"{name} pass@{k}", lambda run: run.pass_at(name, k), "{:.3f}".format)


def note(variants: Sequence[Variant]) -> str:
    """What the table's reader must know."""
    selected = [
        variant.label
        for variant in variants
        if variant.runs[0].job.spec.algorithm.drop_zero_advantage
    ]
    several = any(len(variant.runs) > 1 for variant in variants)
    return " ".join(
        [
            NOTE,
            *([SEVERAL] if several else []),
            *([SELECTED.format(", ".join(selected))] if selected else []),
        ]
    )


def table(
    variants: Sequence[Variant], rewards: Sequence[float]
) -> tuple[list[str], list[list[str]]]:
    """The head and the rows: a column per variant and a row per number, so that any number of
    numbers fits.
    """
    rows = [*ROWS, *(_evaluation(name, k) for name, k in evaluated(variants))]
    body = [
        ["policy", *(variant.policy for variant in variants)],
        [
            "seeds",
            *(" ".join(str(run.job.spec.seed) for run in variant.runs) for variant in variants),
        ],
        *(
            [row.name, *(cell(map(row.of, variant.runs), row.form) for variant in variants)]
            for row in rows
        ),
    ]
    for reward in rewards:
        for name, of, form in REACHED:
            body.append(
                [
                    f"{name} to {reward:g}",
                    *(_reached(variant, reward, of, form) for variant in variants),
                ]
            )
    return ["run", *(variant.label for variant in variants)], body


def cell(values: Iterable[float | None], form: Callable[[float], str]) -> str:
    """Example: 0.8 of one run is "0.8"; 0.7 and 0.9 of two are "0.8 (0.7 to 0.9)"; without any it
    is "-".
    """
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    low, high = form(min(known)), form(max(known))
    return low if low == high else f"{form(fmean(known))} ({low} to {high})"


def _reached(
    variant: Variant, reward: float, of: Callable[[Step], float], form: Callable[[float], str]
) -> str:
    steps = [step for run in variant.runs if (step := run.first_reaching(reward)) is not None]
    if not steps:
        return _never(variant)
    told = cell([of(step) for step in steps], form)
    return (
        told
        if len(steps) == len(variant.runs)
        else f"{told}, {len(steps)} of {len(variant.runs)} runs"
    )


def _never(variant: Variant) -> str:
    best = [run.best_reward for run in variant.runs if run.best_reward is not None]
    return f"not reached, best {compact(max(best))}" if best else f"fewer than {SMOOTHING} steps"
