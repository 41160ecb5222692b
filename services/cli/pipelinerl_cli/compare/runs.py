"""Runs as they are compared, over their training time, so that start-up counts for none of them;
and variants: runs that differ in nothing but their seed.

A session's first token is known to a second only, the actors' reporting period.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pipelinerl_cli.report.svg import Line, smooth
from pipelinerl_cli.run_folder import load_run
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.runs.facts import JobFacts
from pipelinerl_common.runs.history import RunHistory, Step
from pipelinerl_common.runs.summary import summarize
from pipelinerl_common.settings import Job

SMOOTHING = 5
"""A reward counts as reached when the mean of this many steps has reached it."""
ROUNDING = 1e-9
"""Keeps a mean of 0.8 that was summed up from being 0.7999...."""
NUM_POINTS = 200
"""Points of a curve over several runs, which have no steps in common."""

Series = tuple[Sequence[float], Sequence[float]]
"""Places, ascending, and values."""


@dataclass(frozen=True)
class Compared:
    """One run, with the numbers that are compared."""

    root: Path
    label: str
    job: Job
    history: RunHistory
    """In training time."""
    summary: dict[str, Any]

    @property
    def name(self) -> str:
        """The folder's name."""
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
        """The share of the trainer's time in which it waits for batches."""
        steps = [step for step in self.history.steps if step.get("step_seconds") > 0]
        waited = sum(step.values.get("wait_seconds", 0.0) for step in steps)
        whole = sum(step.get("step_seconds") for step in steps)
        return waited / whole if whole else None

    @property
    def places_in_use(self) -> float | None:
        """The share of the generators' places for sequences that is in use, up to the last step."""
        end, places = self._last.t if self._last else 0.0, JobFacts(self.job).num_places
        share = self.history.places_in_use(0.0, end, places)
        return share if math.isfinite(share) else None

    def pass_at(self, name: str, k: int) -> float | None:
        """The newest pass@k on the evaluation set `name`."""
        results = self.history.evaluations.get(name, ())
        found = [each.pass_at[k] for each in results if k in each.pass_at]
        return found[-1].mean if found else None

    @property
    def _last(self) -> Step | None:
        steps = self.history.steps
        return steps[-1] if steps and steps[-1].t > 0 else None


def load(roots: Sequence[Path]) -> list[Compared]:
    """Raises SettingsError when one is not a run's folder, or is given twice."""
    names = [root.resolve().name for root in roots]
    runs = [
        load_one(root, name if names.count(name) == 1 else str(root))
        for root, name in zip(roots, names, strict=True)
    ]
    folders = [root.resolve() for root in roots]
    for root, folder in zip(roots, folders, strict=True):
        if folders.count(folder) > 1:
            raise SettingsError(f"{root}: this folder is given twice; give each run once")
    return runs


def load_one(root: Path, label: str) -> Compared:
    """Raises SettingsError when `root` is not a run's folder."""
    run = load_run(root)
    history = run.history()
    summary = summarize(history, status=run.status, job=run.job.name, seed=run.job.spec.seed)
    return Compared(root, label, run.job, history.in_training_time(), summary)


@dataclass(frozen=True, slots=True)
class Variant:
    """At least one run; several differ in their seed only."""

    label: str
    runs: tuple[Compared, ...]

    @property
    def job(self) -> Job:
        """The first run's, which differs from the others in its seed only."""
        return self.runs[0].job

    @property
    def policy(self) -> str:
        """Example: "conventional, stepsPerGeneration 4"."""
        staleness = self.job.spec.staleness
        parameters = (staleness.model_extra or {}).items()
        return ", ".join([staleness.policy, *(f"{name} {value}" for name, value in parameters)])

    def lines(self, colour: int, series: Callable[[Compared], Series]) -> list[Line]:
        """The runs' mean; behind that of several runs the range from the lowest to the highest."""
        if len(self.runs) == 1:
            return [Line(self.label, *series(self.runs[0]), colour)]
        curve = curve_of([series(run) for run in self.runs])
        band = Line(self.label, curve.xs, curve.high, colour, "band", curve.low)
        return [band, Line(self.label, curve.xs, curve.mean, colour)]


@dataclass(frozen=True, slots=True)
class Curve:
    """Several runs' values at places that all of them have reached."""

    xs: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def curve_of(series: Sequence[Series]) -> Curve:
    """Each run's values interpolated linearly, from where the last run begins to where the first
    one ends.

    Empty when a run has no values, or one ends before another begins.
    """
    if not all(len(xs) for xs, _ in series):
        return Curve([], [], [], [])
    start, end = max(xs[0] for xs, _ in series), min(xs[-1] for xs, _ in series)
    if end < start:
        return Curve([], [], [], [])
    places = np.linspace(start, end, NUM_POINTS)
    values = np.stack([np.interp(places, xs, ys) for xs, ys in series])
    edges = (places, values.mean(0), values.min(0), values.max(0))
    return Curve(*(each.tolist() for each in edges))


def variants(runs: Sequence[Compared]) -> list[Variant]:
    """In the order of their first runs. Runs of the same settings and seed are repetitions: each is
    a variant of its own.
    """
    groups: dict[str, list[Compared]] = {}
    for run in runs:
        settings = run.job.spec.model_dump(mode="json", exclude={"seed"})
        groups.setdefault(json.dumps(settings, sort_keys=True), []).append(run)
    found: dict[int, list[Compared]] = {}
    for group in groups.values():
        is_one = len({run.job.spec.seed for run in group}) == len(group)
        for each in [group] if is_one else [[run] for run in group]:
            found[runs.index(each[0])] = each
    return [Variant(_label(found[k], runs), tuple(found[k])) for k in sorted(found)]


def _label(group: Sequence[Compared], runs: Sequence[Compared]) -> str:
    """The folders' common name where no other run has it, as of seed-1/fast and seed-2/fast."""
    if len(group) == 1:
        return group[0].label
    name = group[0].name
    same_name = [run for run in runs if run.name == name]
    if len(same_name) == len(group) and all(run in group for run in same_name):
        return name
    return f"{group[0].label} and {len(group) - 1} more"
