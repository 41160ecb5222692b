"""The facts that the rules judge: what follows from a job file alone, and what a run's metrics say
where it has settled, in the later half of its steps.
"""

import math
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from pipelinerl_common.metrics import EVALUATOR
from pipelinerl_common.runs.history import RunHistory, Step, mean_over_time
from pipelinerl_common.runs.records import (
    REPORTING_EVERY_SECOND,
    SESSION_ROLE,
    Record,
    counter_total,
    has_left,
    quiet_in_file_s,
    read_records,
    silences,
)
from pipelinerl_common.runs.summary import summarize
from pipelinerl_common.settings import Job, JobSpec
from pipelinerl_staleness.registry import make_policy

DEVICE_LOST = re.compile(r" ERROR .*the GPU does not answer: (?P<reason>.*)")
GIVEN_UP = re.compile(
    r"(?P<time>\S*) .*trajectory given up: reason=(?P<reason>\S+) (?P<message>.*)"
)
MAX_LOG_BYTES = 32 << 20
"""Only so much of a log's end is read."""
FEWEST_POINTS = 5
"""A gauge with fewer points has no meaningful mean."""


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What follows from a job file."""

    job: Job
    actors_in_use: float | None = None
    """On average, in a run with `autoscale`."""

    @property
    def spec(self) -> JobSpec:
        return self.job.spec

    @property
    def num_actors(self) -> float:
        """With `autoscale` the number that there was, or of a job alone the number that there may
        be.
        """
        return self.spec.most_actors if self.actors_in_use is None else self.actors_in_use

    @property
    def num_places(self) -> int:
        """Sequences that all generators can decode at once."""
        actors = self.spec.actors
        per_actor = actors.generators_per_replica * actors.generator.max_running_requests
        return round(self.num_actors * per_actor)

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
        return self._max_outstanding * self.spec.task.group_size

    @property
    def planned_lag(self) -> int:
        """g_max = ceil(H * I * L / (mean * B)) of the paper's appendix A.3 with lengths uniform up
        to maxTokens (L / mean = 2), but no more than the batches that the policy lets be
        outstanding.
        """
        uncapped = math.ceil(2 * self.num_places / self.batch_size)
        return min(uncapped, math.ceil(self._max_outstanding / self.spec.algorithm.groups_per_step))

    @property
    def _max_outstanding(self) -> int:
        """Groups that a fresh policy of the job's kind lets be outstanding."""
        policy = make_policy(self.spec.staleness.parse(), self.spec.algorithm.groups_per_step)
        return policy.max_outstanding()


@dataclass(frozen=True)
class RunFacts:
    """What a run's records and logs say."""

    job_file: Job
    status: str
    """As in summary.json; "running" without one."""
    records: tuple[Record, ...]
    failure: str = ""
    """Why the run failed, in one line."""
    logs: Path | None = None
    """Folder of the processes' logs."""
    now: float | None = None
    """Seconds since the epoch, for a run that a process of this machine runs at the moment."""

    @classmethod
    def of(
        cls, root: Path, job: Job, status: str, *, failure: str, now: float | None = None
    ) -> "RunFacts":
        """The facts of the run in `root`. Raises SettingsError when metrics.jsonl cannot be
        read.
        """
        records = tuple(read_records(root / "metrics.jsonl"))
        return cls(job, status, records, failure=failure, logs=root / "logs", now=now)

    @cached_property
    def job(self) -> JobFacts:
        """With the actors that there were, in a run with `autoscale`."""
        if not self.job_file.spec.autoscale.enabled or not self.settled:
            return JobFacts(self.job_file)
        counts = self.history.at_steps(SESSION_ROLE, "actors_ready")
        in_use = mean(count for step, count in counts if step >= self.settled[0].step)
        return JobFacts(self.job_file, in_use if in_use > 0 else None)

    @cached_property
    def messages(self) -> Mapping[str, str]:
        """The actors' log messages on trajectories that were given up, by the reason that rollout
        errors are counted by.
        """
        return {} if self.logs is None else given_up_messages(self.logs)

    @cached_property
    def lost_devices(self) -> Mapping[str, str]:
        """Generators whose GPU does not answer by the newest line about it in their logs, with the
        reason.
        """
        return {} if self.logs is None else lost_devices(self.logs)

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
        """Since the beginning of the newest session, up to now, or up to the last record of a run
        that is not live.
        """
        return 0.0 if self.history.time.session_start is None else max(0.0, self._end - self._begin)

    @property
    def serving_seconds(self) -> float | None:
        """Since the generators serve the weights, in the newest session; None until they do."""
        served = (
            each.time
            for each in self.records
            if each.time >= self._begin and each.values.get("served_version", -1.0) >= 0
        )
        first = min(served, default=None)
        return None if first is None else max(0.0, self._end - first)

    @cached_property
    def silent(self) -> dict[str, float]:
        """Processes that neither end nor answer, with the seconds of their silence: generators that
        `pipelinerl up` has reported, and actors and preprocessors whose records have ceased.
        """
        if self.status == "finished":
            return {}
        unanswered: dict[str, float] = {}
        reported: dict[str, float] = {}
        for record in self.records:
            if record.time < self._begin:
                continue
            # A run that does not run any more ended its processes one after the other.
            if record.role in REPORTING_EVERY_SECOND and self.status == "running":
                reported[record.instance] = record.time
            if has_left(record):
                reported.pop(record.instance, None)
            for name, seconds in silences(record).items():
                unanswered[name] = seconds + self._end - record.time if seconds > 0 else 0.0
        usual = quiet_in_file_s(self.history.seconds)
        gaps = {name: self._end - last for name, last in reported.items()}
        lasting = {name: seconds for name, seconds in unanswered.items() if seconds}
        return lasting | {name: gap for name, gap in gaps.items() if gap > usual}

    @property
    def evaluating(self) -> tuple[int, float] | None:
        """The step whose evaluation has begun in the newest session and not ended, and for how many
        seconds; None without.
        """
        step, since = -1, 0.0
        for record in self.records:
            running = record.values.get("evaluation_running_step", math.nan)
            is_newer = math.isfinite(running) and running != step
            if record.role == EVALUATOR and record.time >= self._begin and is_newer:
                step, since = int(running), record.time
        return None if step < 0 else (step, self._end - since)

    @property
    def _begin(self) -> float:
        """The newest session's beginning; 0 without one."""
        return self.history.time.session_start or 0.0

    @cached_property
    def _end(self) -> float:
        newest = max((record.time for record in self.records), default=0.0)
        return newest if self.now is None else self.now

    @property
    def settled(self) -> list[Step]:
        steps = self.history.steps
        return steps[len(steps) // 2 :]

    @property
    def _window(self) -> tuple[float, float]:
        """From the first to the last settled step; empty without any."""
        return (self.settled[0].t, self.settled[-1].t) if self.settled else (math.inf, -math.inf)

    def mean(self, name: str) -> float:
        """A trainer's value over the settled steps; not-a-number without any."""
        return mean(step.get(name) for step in self.settled)

    def means(self, *names: str) -> dict[str, float]:
        """`mean` by name."""
        return {name: self.mean(name) for name in names}

    def first(self, name: str) -> float:
        """A trainer's value over the first steps."""
        return mean(step.get(name) for step in self.history.first_steps)

    def last(self, name: str) -> float:
        """A trainer's value over the last steps."""
        return mean(step.get(name) for step in self.history.last_steps)

    def step_share(self, name: str) -> float:
        """One of the trainer's times as a share of the step's."""
        whole = self.mean("step_seconds")
        return self.mean(name) / whole if whole > 0 else math.nan

    def gauge(self, role: str, name: str) -> list[float]:
        """A gauge's values during the settled steps, summed over the role's instances."""
        start, end = self._window
        return [point.value for point in self.history.gauge(role, name) if start <= point.t <= end]

    def gauge_mean(self, role: str, name: str) -> float:
        """Mean of a gauge during the settled steps; not-a-number when it was seldom reported."""
        if len(self.gauge(role, name)) < FEWEST_POINTS:
            return math.nan
        return mean_over_time(self.history.gauge(role, name), *self._window)

    def total(self, role: str, name: str) -> float:
        return self.history.total(role, name)

    def by_instance(self, role: str, name: str) -> dict[str, float]:
        """A counter's increase during the settled steps, by instance."""
        start, end = self._window
        values: dict[str, list[float]] = {}
        for record in self.records:
            is_settled = start <= self.history.time.at(record.time) <= end
            if record.role == role and name in record.values and is_settled:
                values.setdefault(record.instance, []).append(record.values[name])
        return {
            instance: counter_total([value - each[0] for value in each])
            for instance, each in values.items()
        }

    @property
    def wait_share(self) -> float:
        """Share of the step's time in which the trainer waits for its batch."""
        return self.step_share("wait_seconds")

    @property
    def kv_usage(self) -> float:
        """Mean KV use of the fullest generator, as a share; not-a-number where the engines do not
        report it.
        """
        return self.gauge_mean("preprocessor", "engine_kv_usage_ratio")

    @property
    def preemptions_per_trajectory(self) -> float:
        """Over the settled steps; not-a-number when it is not reported or nothing was trained."""
        preempted = sum(self.by_instance("preprocessor", "engine_preemptions_total").values())
        trained = sum(step.get("num_sequences") for step in self.settled)
        is_reported = bool(self.gauge("preprocessor", "engine_kv_usage_ratio"))
        return preempted / trained if is_reported and trained > 0 else math.nan

    @property
    def fill(self) -> float:
        """Requests running over the generators' places, of as many actors as there were;
        not-a-number when seldom reported.
        """
        if len(self.gauge("actor", "requests_running")) < FEWEST_POINTS:
            return math.nan
        return self.history.places_in_use(*self._window, self.job.num_places)


def mean(values: Iterable[float]) -> float:
    """Mean of the finite values; not-a-number without any, so that no comparison with it holds."""
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else math.nan


def given_up_messages(logs: Path, most_bytes: int = MAX_LOG_BYTES) -> dict[str, str]:
    """The newest message by reason, from the last `most_bytes` of each actor's log."""
    newest: dict[str, re.Match[str]] = {}
    for log in sorted(logs.glob("actor-*.log")):
        with suppress(OSError), log.open("rb") as lines:
            lines.seek(max(0, lines.seek(0, os.SEEK_END) - most_bytes))
            matches = (GIVEN_UP.match(line.decode(errors="replace")) for line in lines)
            for each in filter(None, matches):
                known = newest.get(each["reason"], each)
                newest[each["reason"]] = max(known, each, key=lambda match: match["time"])
    return {reason: each["message"] for reason, each in newest.items()}


def lost_devices(logs: Path, most_bytes: int = MAX_LOG_BYTES) -> dict[str, str]:
    """The reason by process, for those that have not said since that their GPU answers again."""
    lost: dict[str, str] = {}
    for log in sorted(logs.glob("*.log")):
        with suppress(OSError), log.open("rb") as lines:
            lines.seek(max(0, lines.seek(0, os.SEEK_END) - most_bytes))
            for line in lines:
                if found := DEVICE_LOST.search(line.decode(errors="replace")):
                    lost[log.stem] = found["reason"]
                elif b"the GPU answers again" in line:
                    lost.pop(log.stem, None)
    return lost
