"""A run as time series, from its metrics records."""

import bisect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass

from pipelinerl_common.metrics import EVALUATOR
from pipelinerl_common.metrics.catalog import MAX_LAG_BUCKET
from pipelinerl_common.runs.evaluations import evaluations
from pipelinerl_common.runs.records import Record, counter_total, ends_step
from pipelinerl_common.runs.totals import ActiveTime, Generation, TrainingTime

LAG_BUCKETS = tuple(
    f"lag_steps_bucket{{le={bound}}}" for bound in (*range(MAX_LAG_BUCKET + 1), "+Inf")
)
EDGE_STEPS = 5
"""First and last values of a run are means over at most this many steps."""


@dataclass(frozen=True, slots=True)
class SeriesPoint:
    """One value of a series. `t` is seconds of the run, as its history counts them."""

    t: float
    value: float


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step as the trainer reported it. Example: samples=13*256 at step 13 of a job
    with 32 groups of 8.
    """

    step: int
    t: float
    samples: float
    """Trajectories trained up to and including this step."""
    tokens: float
    """Tokens trained up to and including this step."""
    values: dict[str, float]
    tokens_by_lag: tuple[float, ...] = ()
    """Trained tokens of lag 0, 1, ..., the last for all above; empty when the run does not report
    them.
    """

    def get(self, name: str) -> float:
        return self.values.get(name, math.nan)


class RunHistory:
    """Time series of one run, over all its sessions."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.generation = Generation()
        self._by_role: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            self.generation.take(record)
            self._by_role[record.role].append(record)
        self._training_time: TrainingTime | None = None
        self.steps = _steps(self._by_role["trainer"], self.at)
        self.evaluations = evaluations(self._by_role[EVALUATOR])

    @property
    def time(self) -> ActiveTime:
        return self.generation.time

    @property
    def seconds(self) -> float:
        return self.time.total

    @property
    def training_seconds(self) -> float:
        """In which it generated or trained, without start-up and shutdown of its sessions."""
        return self.generation.training_time.total

    @property
    def num_void_steps(self) -> int:
        """Steps that the trainer did before it went back to an earlier checkpoint. They are not
        among `steps`.
        """
        return len(self._done) - len(self.steps)

    @property
    def void_tokens(self) -> float:
        """The tokens that were trained in these steps."""
        done = sum(record.values.get("num_trained_tokens", 0.0) for record in self._done)
        return done - (self.steps[-1].tokens if self.steps else 0.0)

    @property
    def _done(self) -> list[Record]:
        return [record for record in self._by_role["trainer"] if ends_step(record)]

    @property
    def first_steps(self) -> Sequence[Step]:
        """At most `EDGE_STEPS` and no step of `last_steps`: 3 of 7 steps. A single step is a first
        one.
        """
        return self.steps[: self._num_edge]

    @property
    def last_steps(self) -> Sequence[Step]:
        return self.steps[max(self._num_edge, len(self.steps) - self._num_edge) :]

    @property
    def _num_edge(self) -> int:
        return min(EDGE_STEPS, max(1, len(self.steps) // 2))

    def at(self, time: float) -> float:
        """The place of clock time `time` in these series."""
        return (self._training_time or self.time).at(time)

    def in_training_time(self) -> "RunHistory":
        """The same series over `training_seconds`, without the values of start-up and shutdown."""
        training = copy(self)
        training._training_time = self.generation.training_time
        training.steps = _steps(self._by_role["trainer"], training.at)
        return training

    def of_steps(self, name: str) -> list[SeriesPoint]:
        """The trainer's per-step value over time, where it is finite."""
        finite = (step for step in self.steps if math.isfinite(step.get(name)))
        return [SeriesPoint(step.t, step.get(name)) for step in finite]

    def gauge(self, role: str, name: str) -> list[SeriesPoint]:
        """A value over time, summed over the role's instances with each one's newest value."""
        latest: dict[str, float] = {}
        points: list[SeriesPoint] = []
        for record in self._by_role[role]:
            if math.isfinite(record.values.get(name, math.nan)):
                latest[record.instance] = record.values[name]
                if self._training_time is None or self._training_time.contains(record.time):
                    points.append(SeriesPoint(self.at(record.time), sum(latest.values())))
        return points

    def places_in_use(self, start: float, until: float, places: float) -> float:
        """The share of the generators' places for sequences that was in use.

        Without a recorded number of places there are `places`. Not-a-number when the run does not
        report how many sequences ran.
        """
        running, limit = (
            mean_over_time(self.gauge("actor", name), start, until)
            for name in ("requests_running", "requests_limit")
        )
        return running / (limit if limit > 0 else places)

    def at_steps(self, role: str, name: str) -> list[tuple[int, float]]:
        """A value of a role with one process as it was at the end of each step, without the steps
        before its first record.
        """
        records = [each for each in self._by_role[role] if name in each.values]
        times = [self.at(each.time) for each in records]
        found = [(step.step, bisect.bisect_right(times, step.t)) for step in self.steps]
        return [(step, records[place - 1].values[name]) for step, place in found if place]

    def total(self, role: str, name: str) -> float:
        """A counter's total over all instances and restarts of their processes."""
        values: dict[str, list[float]] = defaultdict(list)
        for record in self._by_role[role]:
            if math.isfinite(record.values.get(name, math.nan)):
                values[record.instance].append(record.values[name])
        return sum(map(counter_total, values.values()))

    def totals_between(self, role: str, prefix: str, suffix: str) -> dict[str, float]:
        """Totals above 0 of the counters named prefix + reason + suffix, by reason."""
        names = {name for record in self._by_role[role] for name in record.values}
        totals = {}
        for name in sorted(names):
            reason = name.removeprefix(prefix).removesuffix(suffix)
            if reason and name == f"{prefix}{reason}{suffix}" and (total := self.total(role, name)):
                totals[reason] = total
        return totals


def mean_over_time(points: Sequence[SeriesPoint], start: float, until: float) -> float:
    """Mean from `start` to `until` of a value that holds until its next point. Not-a-number without
    a point by then.

    Example: 4 at 0 s and 1 at 2 s, from 0 to 3 s: (2 * 4 + 1 * 1) / 3 = 3.
    """
    known = [point for point in points if point.t <= until]
    if not known:
        return math.nan
    ends = [*(point.t for point in known[1:]), until]
    held = [max(0.0, end - max(start, point.t)) for point, end in zip(known, ends, strict=True)]
    if sum(held) <= 0:
        return known[-1].value
    weighted = (point.value * seconds for point, seconds in zip(known, held, strict=True))
    return sum(weighted) / sum(held)


def _steps(records: Iterable[Record], at: Callable[[float], float]) -> list[Step]:
    """The steps that count: a trainer that goes back to a checkpoint makes its steps since then
    void.
    """
    valid: list[tuple[Record, tuple[float, ...]]] = []
    previous: tuple[float, ...] = ()
    for record in filter(ends_step, records):
        while valid and valid[-1][0].step >= record.step:
            valid.pop()
        counted = tuple(record.values[name] for name in LAG_BUCKETS if name in record.values)
        valid.append((record, _lags_of_step(previous, counted)))
        previous = counted
    steps: list[Step] = []
    samples = tokens = 0.0
    for record, lags in valid:
        samples += record.values.get("num_sequences", 0.0)
        tokens += record.values.get("num_trained_tokens", 0.0)
        steps.append(Step(record.step, at(record.time), samples, tokens, dict(record.values), lags))
    return steps


def _lags_of_step(previous: tuple[float, ...], counted: tuple[float, ...]) -> tuple[float, ...]:
    """Tokens by lag that one step added. The trainer counts tokens up to each lag since its process
    started.

    Example: (5, 9) and then (6, 12) are 1 token of lag 0 and 2 of lag 1.
    """
    if len(previous) != len(counted) or any(
        now < then for then, now in zip(previous, counted, strict=True)
    ):
        previous = (0.0,) * len(counted)
    grown = [now - then for then, now in zip(previous, counted, strict=True)]
    return tuple(here - below for below, here in zip([0.0, *grown], grown, strict=False))
