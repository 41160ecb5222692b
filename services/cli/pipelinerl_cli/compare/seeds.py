"""Runs that differ in nothing but their seed stand together: one line in a plot, with the range of
the runs around it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pipelinerl_cli.compare.runs import Compared
from pipelinerl_cli.report.svg import Line
from pipelinerl_common.settings import Job

NUM_POINTS = 200
"""Of a curve over several runs, which have no steps in common."""

Series = tuple[Sequence[float], Sequence[float]]
"""Places, ascending, and values."""


@dataclass(frozen=True, slots=True)
class Variant:
    """At least one run."""

    label: str
    runs: tuple[Compared, ...]

    @property
    def policy(self) -> str:
        """Example: "conventional, stepsPerGeneration 4"."""
        staleness = self.runs[0].job.spec.staleness
        return ", ".join(
            [
                staleness.policy,
                *(f"{name} {value}" for name, value in (staleness.model_extra or {}).items()),
            ]
        )

    def lines(self, colour: int, series: Callable[[Compared], Series]) -> list[Line]:
        """The runs' mean; below it, of several, the range from the lowest to the highest."""
        if len(self.runs) == 1:
            return [Line(self.label, *series(self.runs[0]), colour)]
        curve = curve_of([series(run) for run in self.runs])
        band = Line(self.label, curve.xs, curve.high, colour, "band", curve.low)
        return [band, Line(self.label, curve.xs, curve.mean, colour)]


@dataclass(frozen=True, slots=True)
class Curve:
    """Several runs' values at places that all of them have come to."""

    xs: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def curve_of(series: Sequence[Series]) -> Curve:
    """Each run's values between its own places by straight lines, from where the last run begins to
    where the first one ends.

    Empty when a run has no values, or one ends before another begins.
    """
    if not all(len(xs) for xs, _ in series):
        return Curve([], [], [], [])
    start, end = max(xs[0] for xs, _ in series), min(xs[-1] for xs, _ in series)
    if end < start:
        return Curve([], [], [], [])
    places = np.linspace(start, end, NUM_POINTS)
    values = np.stack([np.interp(places, xs, ys) for xs, ys in series])
    return Curve(
        *(each.tolist() for each in (places, values.mean(0), values.min(0), values.max(0)))
    )


def variants(runs: Sequence[Compared]) -> list[Variant]:
    """In the order of their first runs. Runs of the same settings and seed are repetitions, and
    stand each for itself.
    """
    groups: dict[str, list[Compared]] = {}
    for run in runs:
        groups.setdefault(_settings(run.job), []).append(run)
    together = [
        group
        for group in groups.values()
        if len({run.job.spec.seed for run in group}) == len(group)
    ]
    grouped = {id(run): group for group in together for run in group}
    apart = [grouped.get(id(run), [run]) for run in runs]
    return [
        Variant(_label(group, runs), tuple(group))
        for run, group in zip(runs, apart, strict=True)
        if group[0] is run
    ]


def _settings(job: Job) -> str:
    return json.dumps(job.spec.model_dump(mode="json", exclude={"seed"}), sort_keys=True)


def _label(group: Sequence[Compared], runs: Sequence[Compared]) -> str:
    """The folders' name where it is theirs alone, as of seed-1/fast and seed-2/fast."""
    if len(group) == 1:
        return group[0].label
    name = group[0].name
    if (
        [run.name for run in runs].count(name)
        == len(group)
        == [run.name for run in group].count(name)
    ):
        return name
    return f"{group[0].label} and {len(group) - 1} more"
