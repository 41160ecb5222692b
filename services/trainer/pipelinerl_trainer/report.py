"""The trainer's report of each step: one log line, and one record on the metrics stream."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipelinerl.v1 import metrics_pb2
from pipelinerl_common import stream
from pipelinerl_common.errors import Unavailable
from pipelinerl_common.metrics import PREFIX, Metrics, record_of
from pipelinerl_common.settings import StreamSettings
from pipelinerl_common.telemetry import fields, memory_bytes
from pipelinerl_common.types import StepPlan
from pipelinerl_trainer.learner import SKIPPED_STEPS
from pipelinerl_trainer.metrics import LAG_BINS, StepMetrics
from pipelinerl_trainer.publisher import PublisherStatus

log = logging.getLogger(__name__)

RECONNECT_POLL_S = 0.5
"""Period of checks whether the stream's server is reachable again."""
MAX_WAITING = 1024
"""Records kept while the stream's server is unreachable; beyond it the oldest are dropped."""

_OF_BATCH = (
    "reward_mean",
    "success_mean",
    "completion_length_mean",
    "completion_overflow_ratio",
    "packing_fill",
    "packing_imbalance",
)
"""The preprocessor's metrics of a batch."""

_LAST = ("policy_version", "reward_mean", "lag_mean", "ess")
"""Metrics that are written at the end of the run."""

_LOGGED = (
    "reward_mean",
    "loss",
    "grad_norm",
    "ess",
    "lag_mean",
    "lag_max",
    "entropy",
    "kl_ref",
    "num_trained_tokens",
    "wait_seconds",
    "train_seconds",
    "step_seconds",
)


@dataclass(frozen=True, slots=True)
class StepReport:
    """The training thread's report of a finished step."""

    plan: StepPlan
    values: Mapping[str, float]
    """The learner's values by the names of the metrics."""
    phases: Mapping[str, float]
    step_seconds: float
    num_checkpoint_failures: int


class Reporter:
    """Logs and publishes the metrics of all ranks, in rank 0's event loop; the ranks' numbers are
    reduced before they arrive here.
    """

    def __init__(self, metrics: Metrics, instance: str, namespace: str | None = None) -> None:
        self._metrics = metrics
        self._instance = instance
        self._namespace = namespace
        self._shown: set[str] = set()
        """Gauges that the previous step had."""
        self._records: deque[metrics_pb2.MetricsRecord] = deque(maxlen=MAX_WAITING)
        self._wake = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self.num_dropped = 0
        self._steps = metrics.counter("optimizer_steps_total")
        self._samples = metrics.counter("samples_trained_total")
        self._tokens = metrics.counter("tokens_trained_total")
        self._skipped = metrics.counter(SKIPPED_STEPS)
        self._checkpoint_failures = metrics.counter("checkpoint_failures_total")
        self._phases = metrics.counter("trainer_phase_seconds_total")
        self._lags = metrics.histogram("lag_steps")
        self._updates = metrics.counter("weight_updates_total")
        self._update_failures = metrics.counter("weight_update_failures_total")
        for name in StepMetrics.OPTIONAL:
            metrics.gauge(name)
        metrics.gauge("memory_bytes").read(memory_bytes)

    def step_done(self, num_steps: int, step: StepReport) -> None:
        """Reports the step after which `num_steps` are done. Called in the event loop's thread."""
        values = _gauges(num_steps, step)
        log.info(
            "step=%d %s",
            num_steps,
            fields(**{name: float(values[name]) for name in _LOGGED if name in values}),
        )
        for name in self._shown | values.keys():
            self._metrics.gauge(name).set(values.get(name))
        self._shown = set(values)
        self._count(step)
        if len(self._records) == MAX_WAITING:
            self.num_dropped += 1
        self._records.append(record_of(self._metrics, self._instance, num_steps))
        self._is_empty.clear()
        self._wake.set()

    def _count(self, step: StepReport) -> None:
        self._steps.inc()
        self._samples.inc(step.plan.num_sequences)
        self._tokens.inc(step.values["num_trained_tokens"])
        self._skipped.reach(step.values[SKIPPED_STEPS])
        self._checkpoint_failures.reach(step.num_checkpoint_failures)
        for phase, seconds in step.phases.items():
            self._phases.inc(seconds, phase=phase)
        for lag, name in enumerate(LAG_BINS):
            self._lags.observe(lag, step.values[name])

    def published(self, status: PublisherStatus) -> None:
        """Reports an update that succeeded or failed. Called in the event loop's thread."""
        for name, value in status.values().items():
            self._metrics.gauge(name).set(value)
        self._updates.reach(status.num_updates)
        self._update_failures.reach(status.num_failures)

    async def run(self, url: str, settings: StreamSettings, login: stream.Login) -> None:
        """Publishes records until cancelled; while the server is unreachable they wait. Raises
        SettingsError when it refuses the login.

        Consumes the records of `step_done` and is unblocked by them and by a new connection.
        """
        while True:
            try:
                async with stream.connect(
                    url,
                    self._metrics.job,
                    settings,
                    name=self._instance,
                    namespace=self._namespace,
                    login=login,
                ) as connection:
                    await self._publish(connection)
            except Unavailable as error:
                log.warning("metrics are not published, trying again: %s", error)

    async def _publish(self, connection: stream.Stream) -> None:
        while True:
            while self._records:
                if not connection.is_connected:
                    await asyncio.sleep(RECONNECT_POLL_S)
                else:
                    await connection.publish_metrics(self._records.popleft())
            self._is_empty.set()
            self._wake.clear()
            await self._wake.wait()

    def write_last(self, file: Path) -> None:
        """Writes the newest step's numbers in Prometheus' text format. A failure is logged."""
        values = self._metrics.values()
        lines = [f"{PREFIX}{name} {values[name]!r}\n" for name in _LAST if name in values]
        try:
            file.write_text("".join(lines), encoding="utf-8")
        except OSError as error:
            log.warning("the last numbers are not written: %s", error)

    async def finish(self, timeout_s: float) -> None:
        """Waits until every record has been published, for at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_empty.wait()
        except TimeoutError:
            log.warning("%d metrics records were not published", len(self._records))


def _gauges(num_steps: int, step: StepReport) -> dict[str, float]:
    """Returns the gauges of a step by name, without those that the step has no number for."""
    others = {SKIPPED_STEPS, *LAG_BINS}
    return {
        **{name: step.plan.metrics[name] for name in _OF_BATCH if name in step.plan.metrics},
        **{name: value for name, value in step.values.items() if name not in others},
        "num_sequences": float(step.plan.num_sequences),
        "policy_version": float(num_steps),
        "last_step_timestamp_seconds": time.time(),
        "wait_seconds": step.phases["wait"],
        "train_seconds": step.phases["train"],
        "step_seconds": step.step_seconds,
    }
