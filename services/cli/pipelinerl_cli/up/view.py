"""What the run looks like now: the newest numbers of every service, bounded, for the display."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipelinerl_cli.results.active_time import SESSION_START
from pipelinerl_cli.results.counters import increase
from pipelinerl_cli.results.evaluations import Evaluated, evaluated, is_evaluation
from pipelinerl_cli.results.generation import Generation
from pipelinerl_cli.results.metrics_file import SESSION_ROLE, THINNING_S_PER_S, Record, ends_step
from pipelinerl_cli.results.step_mean import StepMean
from pipelinerl_cli.up.setback import Setback
from pipelinerl_cli.up.silence import silent_name
from pipelinerl_common.metrics import is_counter

SPARK_STEPS = 40
TRENDS = (
    ("trainer", "reward_mean"),
    ("trainer", "lag_mean"),
    ("trainer", "ess"),
    ("trainer", "pause_seconds"),
    ("actor", "generation_tokens_per_second"),
    ("preprocessor", "queue_groups{stage=ready}"),
)
"""What is remembered for the sparklines, as it was at the end of each of the last steps."""
TELL_EVERY_SECOND = ("actor", "preprocessor")
"""Roles whose processes write a record about once a second, whatever they do."""
QUIET_S = 20.0
"""So long they are not silent by chance."""
GENERATING = "generating the first batch"
"""The phase before the first step."""


def quiet_in_file_s(run_seconds: float) -> float:
    """`QUIET_S` where records come from the run's file, which keeps fewer of them as the run grows
    old.
    """
    return QUIET_S + 3 * THINNING_S_PER_S * run_seconds


def has_left(record: Record) -> bool:
    """Whether it is the last one of an actor that was let go."""
    return record.values.get("requests_limit") == 0.0


@dataclass
class RunView:
    """Fed with the records of a run from its beginning on, those of earlier sessions too; read by
    the displays.
    """

    steps_total: int
    is_elastic: bool = False
    """Whether actors come and go."""
    phase: str = "starting"
    detail: str = ""
    step: int = 0
    step_values: Mapping[str, float] = field(default_factory=dict)
    step_times: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=20))
    generation: Generation = field(default_factory=Generation)
    pause: StepMean = field(default_factory=lambda: StepMean("pause_seconds"))
    setback: Setback = field(default_factory=Setback)
    evaluations: deque[list[Evaluated]] = field(default_factory=lambda: deque(maxlen=SPARK_STEPS))
    """The newest ones, each with its sets."""
    _trends: dict[tuple[str, str], deque[float]] = field(
        default_factory=lambda: {trend: deque(maxlen=SPARK_STEPS) for trend in TRENDS}
    )
    _gauges: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    _counted: dict[tuple[str, str, str], float] = field(default_factory=dict)
    """Counters' newest values by role, instance and name."""
    _totals: dict[tuple[str, str], float] = field(default_factory=dict)
    silent: dict[str, float] = field(default_factory=dict)
    """Generators that do not answer though they run, with the time since when, seconds since the
    epoch.
    """
    _heard: dict[str, float] = field(default_factory=dict)
    """When each of those that tell about themselves every second did so last."""

    def take(self, record: Record) -> bool:
        """Whether the record finished a step."""
        self.generation.take(record)
        self.pause.take(record)
        self.setback.take(record)
        if SESSION_START in record.values:
            self.step_times.clear()  # the time between two sessions says nothing of the pace
            self._gauges.clear()
            self._heard.clear()
            self.silent.clear()
        if record.role in TELL_EVERY_SECOND:
            self._heard[record.instance] = record.time
        if has_left(record):
            self._heard.pop(record.instance, None)
        for name, value in record.values.items():
            self._take_value(record, name, value)
        if is_evaluation(record) and (found := evaluated(record)):
            self.evaluations.append(found)
        if not ends_step(record):
            return False
        self.step = record.step
        self.step_values = record.values
        for (role, name), trend in self._trends.items():
            newest = record.values.get(name) if role == record.role else self.gauge(role, name)
            trend.append(math.nan if newest is None else newest)
        self.step_times.append((record.time, record.step))
        return True

    def _take_value(self, record: Record, name: str, value: float) -> None:
        self._gauges.setdefault((record.role, name), {})[record.instance] = value
        if is_counter(name) and math.isfinite(value):
            self._count(record, name, value)
        if (silent := silent_name(name)) is not None:
            self.silent.pop(silent, None)
            if value > 0:
                self.silent[silent] = record.time - value

    def _count(self, record: Record, name: str, value: float) -> None:
        previous = self._counted.get((record.role, record.instance, name), 0.0)
        self._counted[record.role, record.instance, name] = value
        self._totals[record.role, name] = self._totals.get((record.role, name), 0.0) + increase(
            previous, value
        )

    def gauge(self, role: str, name: str) -> float | None:
        """Newest value of this session, summed over the role's instances."""
        values = self._gauges.get((role, name))
        return sum(values.values()) if values else None

    @property
    def quiet(self) -> Mapping[str, float]:
        """Actors and preprocessors that have told nothing for long while others did, with the
        seconds.
        """
        newest = max(self._heard.values(), default=0.0)
        return {
            name: newest - heard for name, heard in self._heard.items() if newest - heard > QUIET_S
        }

    def trend(self, role: str, name: str) -> Sequence[float]:
        """The value at the end of each of the last steps, one of `TRENDS`; not-a-number where there
        was none.
        """
        return tuple(self._trends[role, name])

    def total(self, role: str, name: str) -> float | None:
        """What a counter has counted over the role's instances and their restarts, in all sessions."""
        return self._totals.get((role, name))

    @property
    def actors(self) -> str:
        """Ready and desired. Example: "1 of 2"."""
        ready, desired = (
            self.gauge(SESSION_ROLE, name) or 0.0 for name in ("actors_ready", "actors_desired")
        )
        return f"{ready:.0f} of {desired:.0f}"

    @property
    def counters(self) -> Mapping[tuple[str, str], float]:
        """`total` of every counter, by role and name."""
        return self._totals

    @property
    def restarts(self) -> int:
        """Of the run's processes."""
        return int(self.total(SESSION_ROLE, "restarts_total") or 0)

    @property
    def is_training(self) -> bool:
        return bool(self.step_times)

    @property
    def is_generating(self) -> bool:
        """The generators serve the job's weights, so that a step can be expected."""
        return self.is_training or self.phase == GENERATING

    @property
    def seconds_per_step(self) -> float | None:
        """From the pace of the last steps."""
        if len(self.step_times) < 2:
            return None
        (t0, first), (t1, last) = self.step_times[0], self.step_times[-1]
        return (t1 - t0) / (last - first) if last > first else None

    @property
    def seconds_left(self) -> float | None:
        pace = self.seconds_per_step
        return None if pace is None else max(0.0, pace * (self.steps_total - self.step))
