"""What a run's metrics say, where it has settled: the later half of its steps."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from pipelinerl_cli.doctor.plan_facts import JobFacts
from pipelinerl_cli.results.history import Point, RunHistory, Step, counter_total
from pipelinerl_cli.results.metrics_file import Record, read_records
from pipelinerl_cli.results.run_folder import load_run
from pipelinerl_cli.results.summary import summarize
from pipelinerl_common.settings import Job

EDGE_STEPS = 5
"""What a run began with is the mean over this many steps."""

FEWEST_POINTS = 5
"""Of a gauge, for a mean that says something."""


@dataclass(frozen=True)
class RunFacts:
    job: JobFacts
    status: str
    """As in summary.json; "running" without one."""
    records: tuple[Record, ...]

    @classmethod
    def of(cls, job: Job, status: str, records: Iterable[Record]) -> "RunFacts":
        return cls(JobFacts(job), status, tuple(records))

    @cached_property
    def history(self) -> RunHistory:
        return RunHistory(self.records)

    @cached_property
    def summary(self) -> dict[str, Any]:
        return summarize(self.history, status=self.status, job=self.job.job.name, seed=self.job.spec.seed)

    @property
    def settled(self) -> list[Step]:
        steps = self.history.steps
        return steps[len(steps) // 2 :]

    def mean(self, name: str) -> float:
        """Of the trainer's value over the settled steps; not-a-number without any."""
        return mean(step.get(name) for step in self.settled)

    def first(self, name: str) -> float:
        """Of the trainer's value over the first steps."""
        return mean(step.get(name) for step in self.history.steps[:EDGE_STEPS])

    def last(self, name: str) -> float:
        """Of the trainer's value over the last steps."""
        return mean(step.get(name) for step in self.history.steps[-EDGE_STEPS:])

    def step_share(self, name: str) -> float:
        """A time of the trainer as a share of the step's."""
        whole = self.mean("step_seconds")
        return self.mean(name) / whole if whole > 0 else math.nan

    def gauge(self, role: str, name: str) -> list[float]:
        """A gauge's values during the settled steps, summed over the role's instances."""
        if not self.settled:
            return []
        start, end = self.settled[0].t, self.settled[-1].t
        points: list[Point] = self.history.gauge(role, name)
        return [point.value for point in points if start <= point.t <= end]

    def gauge_mean(self, role: str, name: str) -> float:
        """Mean of a gauge during the settled steps; not-a-number when it was seldom told."""
        values = self.gauge(role, name)
        return mean(values) if len(values) >= FEWEST_POINTS else math.nan

    def total(self, role: str, name: str) -> float:
        return self.history.total(role, name)

    def by_instance(self, role: str, name: str) -> dict[str, float]:
        """What a counter counted during the settled steps, by instance."""
        if not self.settled:
            return {}
        start, end = self.settled[0].t, self.settled[-1].t
        values: dict[str, list[float]] = {}
        for record in self.records:
            if record.role == role and name in record.values and start <= self.history.time.at(record.time) <= end:
                values.setdefault(record.instance, []).append(record.values[name])
        return {instance: counter_total([value - each[0] for value in each]) for instance, each in values.items()}

    @property
    def wait_share(self) -> float:
        """Share of the step's time that the trainer waits for its batch."""
        return self.step_share("wait_seconds")

    @property
    def kv_usage(self) -> float:
        """Mean KV use of the fullest generator, as a share; not-a-number where the engines do not tell."""
        return self.gauge_mean("preprocessor", "engine_kv_usage_ratio")

    @property
    def preemptions_per_trajectory(self) -> float:
        """Over the settled steps; not-a-number where nobody tells or nothing was trained."""
        preempted = sum(self.by_instance("preprocessor", "engine_preemptions_total").values())
        trained = sum(step.get("num_sequences") for step in self.settled)
        told = bool(self.gauge("preprocessor", "engine_kv_usage_ratio"))
        return preempted / trained if told and trained > 0 else math.nan

    @property
    def fill(self) -> float:
        """Requests running over the generators' places."""
        return self.gauge_mean("actor", "requests_running") / self.job.num_places


def mean(values: Iterable[float]) -> float:
    """Of the finite values; not-a-number without any, so that no comparison with it holds."""
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else math.nan


def load_facts(root: Path) -> RunFacts:
    """Raises SettingsError when `root` is not a run's folder."""
    run = load_run(root)
    return RunFacts.of(run.job, run.status, read_records(root / "metrics.jsonl"))
