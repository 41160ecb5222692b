"""What a run's metrics say, where it has settled: the later half of its steps."""

import math
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from pipelinerl_cli.doctor.plan_facts import JobFacts
from pipelinerl_cli.results.history import Point, RunHistory, Step, counter_total
from pipelinerl_cli.results.metrics_file import THINNING_S_PER_S, Record, read_records
from pipelinerl_cli.results.run_folder import load_run
from pipelinerl_cli.results.summary import summarize
from pipelinerl_cli.up.view import QUIET_S, TELL_EVERY_SECOND, has_left
from pipelinerl_common.settings import Job

SILENT, SECONDS = "silent_", "_seconds"
"""Around a process's name: the name of the value by which `pipelinerl up` tells of its silence."""
GIVEN_UP = re.compile(r"trajectory given up: reason=(?P<reason>\S+) (?P<message>.*)")
MOST_LINES = 200_000
"""Of a log that are read."""
FEWEST_POINTS = 5
"""Of a gauge, for a mean that says something."""


@dataclass(frozen=True)
class RunFacts:
    job: JobFacts
    status: str
    """As in summary.json; "running" without one."""
    records: tuple[Record, ...]
    failure: str = ""
    """Why the run failed, in one line."""
    messages: Mapping[str, str] = field(default_factory=dict)
    """What the actors' logs say of trajectories that were given up, by the reason that rollout errors are counted by."""
    now: float | None = None
    """Seconds since the epoch, of a run that a process of this machine runs at the moment."""

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
    def session_seconds(self) -> float:
        """Since the newest session's begin: up to now, or up to the last record of a run that does not run here."""
        begin = self.history.time.session_start
        return 0.0 if begin is None else max(0.0, self._end - begin)

    @property
    def serving_seconds(self) -> float | None:
        """Since when the generators serve the job's weights, in the newest session; None as long as they do not."""
        begin = self.history.time.session_start or 0.0
        served = (each.time for each in self.records if each.time >= begin and each.values.get("served_version", -1.0) >= 0)
        first = min(served, default=None)
        return None if first is None else max(0.0, self._end - first)

    @property
    def silent(self) -> dict[str, float]:
        """Processes that neither end nor answer, with the seconds of their silence.

        Generators that `pipelinerl up` has told of, and actors and preprocessors whose records have ceased.
        """
        if self.status == "finished":
            return {}
        begin = self.history.time.session_start or 0.0
        told: dict[str, float] = {}
        heard: dict[str, float] = {}
        for record in self.records:
            if record.time < begin:
                continue
            if record.role in TELL_EVERY_SECOND and self.status == "running":  # others are ended in order, one after the other
                heard[record.instance] = record.time
            if has_left(record):
                heard.pop(record.instance, None)
            for name, value in record.values.items():
                if name.startswith(SILENT) and value > 0:
                    told[name.removeprefix(SILENT).removesuffix(SECONDS)] = value + self._end - record.time
                elif name.startswith(SILENT):
                    told.pop(name.removeprefix(SILENT).removesuffix(SECONDS), None)
        usual = QUIET_S + 3 * THINNING_S_PER_S * self.history.seconds
        return told | {name: self._end - last for name, last in heard.items() if self._end - last > usual}

    @property
    def _end(self) -> float:
        return self.now if self.now is not None else max((record.time for record in self.records), default=0.0)

    @property
    def settled(self) -> list[Step]:
        steps = self.history.steps
        return steps[len(steps) // 2 :]

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
        """Requests running over the generators' places, of as many actors as there were."""
        places = self.gauge_mean("actor", "requests_limit")
        return self.gauge_mean("actor", "requests_running") / (places if places > 0 else self.job.num_places)


def mean(values: Iterable[float]) -> float:
    """Of the finite values; not-a-number without any, so that no comparison with it holds."""
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else math.nan


def load_facts(root: Path) -> RunFacts:
    """Raises SettingsError when `root` is not a run's folder."""
    run = load_run(root)
    return RunFacts(
        JobFacts(run.job),
        run.status,
        tuple(read_records(root / "metrics.jsonl")),
        failure=run.failure,
        messages=given_up_messages(root),
        now=time.time() if run.is_live else None,
    )


def given_up_messages(root: Path) -> dict[str, str]:
    """The newest by reason, from the actors' logs."""
    messages: dict[str, str] = {}
    for log in sorted((root / "logs").glob("actor-*.log")):
        with suppress(OSError), log.open(encoding="utf-8", errors="replace") as lines:
            for line in islice(lines, MOST_LINES):
                if found := GIVEN_UP.search(line):
                    messages[found["reason"]] = found["message"]
    return messages
