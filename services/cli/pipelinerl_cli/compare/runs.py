"""Runs as they are compared. Their time is that in which they generated or trained, so that
start-up counts for nobody.

When a session's first token came is known to a second, the actor's period of telling: up to a
second after what counts for it.

Runs that differ in nothing but their seed stand together: one line in a plot, with the range of
the runs around it.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pipelinerl_cli.doctor.facts import JobFacts
from pipelinerl_cli.report.charts import Line, smooth
from pipelinerl_cli.runs.folder import load_run
from pipelinerl_cli.runs.history import RunHistory, Step
from pipelinerl_cli.runs.summary import summarize
from pipelinerl_common.settings import Job

SMOOTHING = 5
"""A reward counts as reached when the mean of this many steps has reached it."""
ROUNDING = 1e-9
"""Keeps a mean of 0.8 that was summed up from being 0.7999...."""


@dataclass(frozen=True)
class Compared:
    root: Path
    label: str
    job: Job
    history: RunHistory
    """In training time."""
    summary: dict[str, Any]

    @property
    def name(self) -> str:
        """The folder's."""
        return self.root.resolve().name

    @cached_property
    def rewards(self) -> list[float]:
        """Mean of the last few steps' rewards, per step."""
        return smooth([step.get("reward_mean") for step in self.history.steps], SMOOTHING)

    def first_reaching(self, reward: float) -> Step | None:
        """The first step at which the smoothed reward is at least `reward`; the first steps are too
        few for a mean.
        """
        for k, (step, value) in enumerate(zip(self.history.steps, self.rewards, strict=True)):
            if value >= reward - ROUNDING and k + 1 >= SMOOTHING:
                return step
        return None

    @property
    def best_reward(self) -> float | None:
        """The highest smoothed reward; None for a run of fewer steps than a mean takes."""
        return max(self.rewards[SMOOTHING - 1 :], default=None)

    @property
    def trajectories_per_second(self) -> float | None:
        """Trained, up to the last step."""
        last = self._last
        return last.samples / last.t if last else None

    @property
    def waiting_share(self) -> float | None:
        """Of the trainer's time, what it waits for batches."""
        steps = [step for step in self.history.steps if step.get("step_seconds") > 0]
        whole = sum(step.get("step_seconds") for step in steps)
        return (
            sum(step.values.get("wait_seconds", 0.0) for step in steps) / whole if whole else None
        )

    @property
    def places_in_use(self) -> float | None:
        """Of the sequences that the generators can decode at once, the share that they do, up to
        the last step.
        """
        share = self.history.places_in_use(
            0.0, self._last.t if self._last else 0.0, JobFacts(self.job).num_places
        )
        return share if math.isfinite(share) else None

    def pass_at(self, name: str, k: int) -> float | None:
        """The newest pass@k on the evaluation set `name`."""
        found = [
            each.pass_at[k] for each in self.history.evaluations.get(name, ()) if k in each.pass_at
        ]
        return found[-1].mean if found else None

    @property
    def _last(self) -> Step | None:
        steps = self.history.steps
        return steps[-1] if steps and steps[-1].t > 0 else None


def load(roots: Sequence[Path]) -> list[Compared]:
    """Raises SettingsError when one is not a run's folder."""
    names = [root.resolve().name for root in roots]
    return [
        load_one(root, name if names.count(name) == 1 else str(root))
        for root, name in zip(roots, names, strict=True)
    ]


def load_one(root: Path, label: str) -> Compared:
    """Raises SettingsError when `root` is not a run's folder."""
    run = load_run(root)
    history = run.history()
    summary = summarize(history, status=run.status, job=run.job.name, seed=run.job.spec.seed)
    return Compared(root, label, run.job, history.in_training_time(), summary)


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
