"""The metrics of a running job: from the stream (`Feed`) and from this process (`SessionRecords`)
into metrics.jsonl, and into what the displays show (`RunView`).
"""

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pipelinerl.v1 import metrics_pb2
from pipelinerl_common.errors import PipelineRLError
from pipelinerl_common.metrics import is_counter
from pipelinerl_common.runs.evaluations import Evaluated, evaluated, is_evaluation
from pipelinerl_common.runs.records import (
    QUIET_S,
    REPORTING_EVERY_SECOND,
    SESSION_ROLE,
    SESSION_START,
    MetricsWriter,
    Record,
    ends_step,
    has_left,
    increase,
    silences,
)
from pipelinerl_common.runs.totals import Generation, Rollback, StepMean
from pipelinerl_common.settings import Job
from pipelinerl_common.stream import Login, connect
from pipelinerl_common.text import counted
from pipelinerl_control.metrics import ActorScale

log = logging.getLogger(__name__)

RETRY_S = 1.0
SPARK_STEPS = 40
TRENDS = (
    ("trainer", "reward_mean"),
    ("trainer", "lag_mean"),
    ("trainer", "ess"),
    ("trainer", "pause_seconds"),
    ("actor", "generation_tokens_per_second"),
    ("preprocessor", "queue_groups{stage=ready}"),
)
"""Values that are kept for the sparklines, as they were at the end of each of the last steps."""
GENERATING = "generating the first batch"
"""The phase before the first step."""


@dataclass
class RunView:
    """The newest numbers of every service, in bounded memory. It takes the records of a run from
    its beginning, those of earlier sessions too, and is read by the displays.
    """

    steps_total: int
    is_elastic: bool = False
    """Whether actors are added and removed."""
    phase: str = "starting"
    detail: str = ""
    step: int = 0
    step_values: Mapping[str, float] = field(default_factory=dict)
    step_times: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=20))
    generation: Generation = field(default_factory=Generation)
    pause: StepMean = field(default_factory=lambda: StepMean("pause_seconds"))
    rollback: Rollback = field(default_factory=Rollback)
    evaluations: deque[list[Evaluated]] = field(default_factory=lambda: deque(maxlen=SPARK_STEPS))
    """The newest ones, each with its sets."""
    silent: dict[str, float] = field(default_factory=dict)
    """Generators that run but do not answer, with the time of their last answer, seconds since the
    epoch.
    """
    counters: dict[tuple[str, str], float] = field(default_factory=dict)
    """`total` of every counter, by role and name."""
    _trends: dict[tuple[str, str], deque[float]] = field(
        default_factory=lambda: {trend: deque(maxlen=SPARK_STEPS) for trend in TRENDS}
    )
    _gauges: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    _counted: dict[tuple[str, str, str], float] = field(default_factory=dict)
    """Counters' newest values by role, instance and name."""
    _reported: dict[str, float] = field(default_factory=dict)
    """The time of the newest record of each process that writes one every second."""

    def take(self, record: Record) -> bool:
        """Whether the record finished a step."""
        self.generation.take(record)
        self.pause.take(record)
        self.rollback.take(record)
        if SESSION_START in record.values:
            # The time between two sessions says nothing about the pace, nor their processes about
            # the new ones.
            self.step_times.clear()
            self._gauges.clear()
            self._reported.clear()
            self.silent.clear()
        if record.role in REPORTING_EVERY_SECOND:
            self._reported[record.instance] = record.time
        if has_left(record):
            self._reported.pop(record.instance, None)
        for name, value in record.values.items():
            self._take_value(record, name, value)
        for name, seconds in silences(record).items():
            self.silent.pop(name, None)
            if seconds > 0:
                self.silent[name] = record.time - seconds
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
            previous = self._counted.get((record.role, record.instance, name), 0.0)
            total = self.counters.get((record.role, name), 0.0) + increase(previous, value)
            self._counted[record.role, record.instance, name] = value
            self.counters[record.role, name] = total

    def gauge(self, role: str, name: str) -> float | None:
        """Newest value of this session, summed over the role's instances."""
        values = self._gauges.get((role, name))
        return sum(values.values()) if values else None

    def total(self, role: str, name: str) -> float | None:
        """A counter's total over the role's instances, their restarts and all sessions."""
        return self.counters.get((role, name))

    def trend(self, role: str, name: str) -> Sequence[float]:
        """One of `TRENDS` at the end of each of the last steps; not-a-number where unknown."""
        return tuple(self._trends[role, name])

    @property
    def quiet(self) -> Mapping[str, float]:
        """Actors and preprocessors that have reported nothing for long while others did, with the
        seconds.
        """
        newest = max(self._reported.values(), default=0.0)
        gaps = {name: newest - time for name, time in self._reported.items()}
        return {name: gap for name, gap in gaps.items() if gap > QUIET_S}

    @property
    def actors(self) -> str:
        """Ready and desired. Example: "1 of 2"."""
        ready, desired = (
            self.gauge(SESSION_ROLE, name) or 0.0 for name in ("actors_ready", "actors_desired")
        )
        return f"{ready:.0f} of {desired:.0f}"

    @property
    def restarts(self) -> int:
        """Restarts of the run's processes."""
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


class SessionRecords:
    """The records that `pipelinerl up` writes about one session: its start, restarts, the number of
    actors, silent generators. They go to the run's file and to the view.
    """

    def __init__(self, writer: MetricsWriter, view: RunView) -> None:
        self.restarts: Counter[str] = Counter()
        """By the name of the restarted process."""
        self.num_lost = 0
        """Records that could not be written."""
        self._writer = writer
        self._view = view
        self._scale: ActorScale | None = None

    def begin(self) -> None:
        self._write({SESSION_START: 1.0, **self._restart_values()})

    def end(self) -> None:
        self._write(self._restart_values())
        self._writer.close()
        if self.num_lost:
            log.warning(
                "%s of this session could not be written to %s",
                counted(self.num_lost, "record"),
                self._writer.path,
            )

    def count_restart(self, name: str) -> None:
        self.restarts[name] += 1
        self._write(self._restart_values())

    def take(self, name: str, value: float) -> None:
        self._write({name: value})

    def take_scale(self, scale: ActorScale) -> None:
        """Written when it has changed."""
        if scale != self._scale:
            self._scale = scale
            self._write(scale.values())

    def _restart_values(self) -> dict[str, float]:
        by_process = {
            f"restarts_{name}_process_total": float(count) for name, count in self.restarts.items()
        }
        return {"restarts_total": float(self.restarts.total()), **by_process}

    def _write(self, values: Mapping[str, float]) -> None:
        record = Record(SESSION_ROLE, SESSION_ROLE, time.time(), -1, values)
        try:
            self._writer.write(record)
        except OSError as error:  # a full disk must end neither the run nor the caller's task
            if not self.num_lost:
                log.warning("the run continues without writing to %s: %s", self._writer.path, error)
            self.num_lost += 1
        self._view.take(record)


class Feed:
    """Consumes the run's metrics subject from its beginning, writes records that are new, and
    passes them on.
    """

    def __init__(
        self,
        job: Job,
        url: str,
        token: str,
        writer: MetricsWriter,
        on_record: Callable[[Record], None],
    ) -> None:
        self._job = job
        self._url = url
        self._token = token
        self._writer = writer
        self._on_record = on_record
        self._arrived = asyncio.Event()

    async def run(self) -> None:
        """Runs until cancelled. Consumes records, and waits for the server while it is unreachable
        and for space on a full disk: metrics never end a run.
        """
        trouble = ""
        while True:
            try:
                await self._follow()
                trouble = ""
            except (PipelineRLError, OSError) as error:  # the latter: a full disk
                if str(error) != trouble:
                    log.warning("metrics are not being kept, trying again: %s", error)
                trouble = str(error)
            await asyncio.sleep(RETRY_S)

    async def settle(self, quiet_s: float, timeout_s: float) -> None:
        """Waits until nothing has arrived for `quiet_s`, at most `timeout_s`: when the run ends,
        its last records are on their way.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while await self._something_arrives(quiet_s):
                    pass
        except TimeoutError:
            log.warning("metrics were still arriving after %g s", timeout_s)

    async def _something_arrives(self, within_s: float) -> bool:
        self._arrived.clear()
        try:
            async with asyncio.timeout(within_s):
                await self._arrived.wait()
        except TimeoutError:
            return False
        return True

    async def _follow(self) -> None:
        job = self._job
        async with (
            connect(
                self._url,
                job.name,
                job.spec.stream,
                name="up",
                namespace=job.metadata.namespace,
                login=Login(token=self._token),
            ) as stream,
            stream.metrics() as records,
        ):
            async for message in records:
                self._take(to_record(message))

    def _take(self, record: Record) -> None:
        self._arrived.set()
        if self._writer.write(record):
            self._on_record(record)


def to_record(message: metrics_pb2.MetricsRecord) -> Record:
    return Record(message.role, message.instance, message.time, message.step, dict(message.values))
