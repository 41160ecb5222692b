"""What follows from a job file alone.

What a run's metrics say, where it has settled: the later half of its steps.
"""

import math
import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

from pipelinerl_cli.runs.folder import load_run
from pipelinerl_cli.runs.history import RunHistory, Step, mean_over_time
from pipelinerl_cli.runs.records import (
    REPORTING_EVERY_SECOND,
    SESSION_ROLE,
    Record,
    counter_total,
    has_left,
    quiet_in_file_s,
    read_records,
    silent_name,
)
from pipelinerl_cli.runs.summary import summarize
from pipelinerl_common.metrics import EVALUATOR
from pipelinerl_common.settings import Job, JobSpec
from pipelinerl_staleness.policy import Policy
from pipelinerl_staleness.registry import make_policy


@dataclass(frozen=True, slots=True)
class JobFacts:
    job: Job
    actors_in_use: float | None = None
    """On average, of a run that scales by itself."""

    @property
    def spec(self) -> JobSpec:
        return self.job.spec

    @property
    def policy(self) -> Policy:
        """A fresh policy of the job's kind."""
        return make_policy(self.spec.staleness.parse(), self.spec.algorithm.groups_per_step)

    @property
    def num_actors(self) -> float:
        """Of a run that scales by itself as many as there were, of such a job as many as there may
        be.
        """
        return self.spec.most_actors if self.actors_in_use is None else self.actors_in_use

    @property
    def num_places(self) -> int:
        """Sequences that all generators can decode at once."""
        actors = self.spec.actors
        return round(
            self.num_actors * actors.generators_per_replica * actors.generator.max_running_requests
        )

    @property
    def num_generating(self) -> float:
        """GPUs that generate; 0 on CPUs."""
        return self.num_actors * self.spec.actors.gpus_per_replica

    @property
    def num_training(self) -> int:
        return self.spec.trainers.replicas * self.spec.trainers.processes_per_node

    @property
    def batch_size(self) -> int:
        """Sequences of one optimizer step."""
        return self.spec.algorithm.groups_per_step * self.spec.task.group_size

    @property
    def max_admitted(self) -> int:
        """Sequences that the staleness policy lets be generated or wait at once."""
        return self.policy.max_outstanding() * self.spec.task.group_size

    @property
    def planned_lag(self) -> int:
        """g_max = ceil(H * I * L / (mean * B)) of the paper's appendix A.3 with lengths uniform up
        to maxTokens (L / mean = 2), but no more than the batches that the policy lets be
        outstanding.
        """
        uncapped = ceil(2 * self.num_places / self.batch_size)
        return min(
            uncapped, ceil(self.policy.max_outstanding() / self.spec.algorithm.groups_per_step)
        )


GIVEN_UP = re.compile(
    r"(?P<time>\S*) .*trajectory given up: reason=(?P<reason>\S+) (?P<message>.*)"
)
MOST_BYTES = 32 << 20
"""Of a log's end that are read."""
FEWEST_POINTS = 5
"""Of a gauge, for a mean that says something."""


@dataclass(frozen=True)
class RunFacts:
    job_file: Job
    status: str
    """As in summary.json; "running" without one."""
    records: tuple[Record, ...]
    failure: str = ""
    """Why the run failed, in one line."""
    logs: Path | None = None
    """Folder of the processes' logs."""
    now: float | None = None
    """Seconds since the epoch, of a run that a process of this machine runs at the moment."""

    @cached_property
    def job(self) -> JobFacts:
        """With the actors that there were, where the run scales by itself."""
        if not self.job_file.spec.autoscale.enabled or not self.settled:
            return JobFacts(self.job_file)
        first = self.settled[0].step
        in_use = mean(
            count
            for step, count in self.history.at_steps(SESSION_ROLE, "actors_ready")
            if step >= first
        )
        return JobFacts(self.job_file, in_use if in_use > 0 else None)

    @cached_property
    def messages(self) -> Mapping[str, str]:
        """What the actors' logs say of trajectories that were given up, by the reason that rollout
        errors are counted by.
        """
        return {} if self.logs is None else given_up_messages(self.logs)

    @cached_property
    def history(self) -> RunHistory:
        return RunHistory(self.records)

    @cached_property
    def summary(self) -> dict[str, Any]:
        return summarize(
            self.history, status=self.status, job=self.job_file.name, seed=self.job_file.spec.seed
        )

    @property
    def session_seconds(self) -> float:
        """Since the newest session's begin: up to now, or up to the last record of a run that does
        not run here.
        """
        return 0.0 if self.history.time.session_start is None else max(0.0, self._end - self._begin)

    @property
    def serving_seconds(self) -> float | None:
        """Since when the generators serve the job's weights, in the newest session; None as long as
        they do not.
        """
        begin = self._begin
        served = (
            each.time
            for each in self.records
            if each.time >= begin and each.values.get("served_version", -1.0) >= 0
        )
        first = min(served, default=None)
        return None if first is None else max(0.0, self._end - first)

    @cached_property
    def silent(self) -> dict[str, float]:
        """Processes that neither end nor answer, with the seconds of their silence.

        Generators that `pipelinerl up` has told of, and actors and preprocessors whose records have
        ceased.
        """
        if self.status == "finished":
            return {}
        begin = self._begin
        told: dict[str, float] = {}
        heard: dict[str, float] = {}
        for record in self.records:
            if record.time < begin:
                continue
            if (
                record.role in REPORTING_EVERY_SECOND and self.status == "running"
            ):  # others are ended in order, one after the other
                heard[record.instance] = record.time
            if has_left(record):
                heard.pop(record.instance, None)
            for name, value in record.values.items():
                if (silent := silent_name(name)) is None:
                    continue
                told.pop(silent, None)
                if value > 0:
                    told[silent] = value + self._end - record.time
        usual = quiet_in_file_s(self.history.seconds)
        return told | {
            name: self._end - last for name, last in heard.items() if self._end - last > usual
        }

    @property
    def evaluating(self) -> tuple[int, float] | None:
        """The step whose evaluation has begun in the newest session and not ended, and for how many
        seconds; None without.
        """
        step, since = -1, 0.0
        for record in self.records:
            running = record.values.get("evaluation_running_step", math.nan)
            if (
                record.role == EVALUATOR
                and record.time >= self._begin
                and math.isfinite(running)
                and running != step
            ):
                step, since = int(running), record.time
        return None if step < 0 else (step, self._end - since)

    @property
    def _begin(self) -> float:
        """Of the newest session; 0 without one."""
        return self.history.time.session_start or 0.0

    @cached_property
    def _end(self) -> float:
        return (
            self.now
            if self.now is not None
            else max((record.time for record in self.records), default=0.0)
        )

    @property
    def settled(self) -> list[Step]:
        steps = self.history.steps
        return steps[len(steps) // 2 :]

    @property
    def _window(self) -> tuple[float, float]:
        """From the first to the last settled step; without any it holds nothing."""
        return (self.settled[0].t, self.settled[-1].t) if self.settled else (math.inf, -math.inf)

    def mean(self, name: str) -> float:
        """Of the trainer's value over the settled steps; not-a-number without any."""
        return mean(step.get(name) for step in self.settled)

    def first(self, name: str) -> float:
        """Of the trainer's value over the first steps."""
        return mean(step.get(name) for step in self.history.first_steps)

    def last(self, name: str) -> float:
        """Of the trainer's value over the last steps."""
        return mean(step.get(name) for step in self.history.last_steps)

    def step_share(self, name: str) -> float:
        """A time of the trainer as a share of the step's."""
        whole = self.mean("step_seconds")
        return self.mean(name) / whole if whole > 0 else math.nan

    def gauge(self, role: str, name: str) -> list[float]:
        """A gauge's values during the settled steps, summed over the role's instances."""
        start, end = self._window
        return [point.value for point in self.history.gauge(role, name) if start <= point.t <= end]

    def gauge_mean(self, role: str, name: str) -> float:
        """Mean of a gauge during the settled steps; not-a-number when it was seldom told."""
        if len(self.gauge(role, name)) < FEWEST_POINTS:
            return math.nan
        return mean_over_time(self.history.gauge(role, name), *self._window)

    def total(self, role: str, name: str) -> float:
        return self.history.total(role, name)

    def by_instance(self, role: str, name: str) -> dict[str, float]:
        """What a counter counted during the settled steps, by instance."""
        start, end = self._window
        values: dict[str, list[float]] = {}
        for record in self.records:
            if (
                record.role == role
                and name in record.values
                and start <= self.history.time.at(record.time) <= end
            ):
                values.setdefault(record.instance, []).append(record.values[name])
        return {
            instance: counter_total([value - each[0] for value in each])
            for instance, each in values.items()
        }

    @property
    def wait_share(self) -> float:
        """Share of the step's time that the trainer waits for its batch."""
        return self.step_share("wait_seconds")

    @property
    def kv_usage(self) -> float:
        """Mean KV use of the fullest generator, as a share; not-a-number where the engines do not
        tell.
        """
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
        """Requests running over the generators' places, of as many actors as there were;
        not-a-number when seldom told.
        """
        if len(self.gauge("actor", "requests_running")) < FEWEST_POINTS:
            return math.nan
        return self.history.places_in_use(*self._window, self.job.num_places)


def mean(values: Iterable[float]) -> float:
    """Of the finite values; not-a-number without any, so that no comparison with it holds."""
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else math.nan


def load_facts(root: Path) -> RunFacts:
    """Raises SettingsError when `root` is not a run's folder."""
    run = load_run(root)
    now = time.time() if run.is_live else None
    return facts_of(root, run.job, run.status, failure=run.failure, now=now)


def facts_of(
    root: Path, job: Job, status: str, *, failure: str, now: float | None = None
) -> RunFacts:
    """Of the run in `root`. Raises SettingsError when metrics.jsonl cannot be read."""
    records = tuple(read_records(root / "metrics.jsonl"))
    return RunFacts(job, status, records, failure=failure, logs=root / "logs", now=now)


def given_up_messages(logs: Path, most_bytes: int = MOST_BYTES) -> dict[str, str]:
    """The newest by reason, from the last `most_bytes` of each actor's log."""
    newest: dict[str, tuple[str, str]] = {}
    for log in sorted(logs.glob("actor-*.log")):
        with suppress(OSError), log.open("rb") as lines:
            lines.seek(max(0, lines.seek(0, os.SEEK_END) - most_bytes))
            for line in lines:
                if found := GIVEN_UP.match(line.decode(errors="replace")):
                    said = found["time"], found["message"]
                    newest[found["reason"]] = max(
                        newest.get(found["reason"], said), said, key=lambda each: each[0]
                    )
    return {reason: message for reason, (_, message) in newest.items()}
