"""What the actor measures, and the record that it publishes about every second."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from pipelinerl_actor.task import Turn
from pipelinerl_common.metrics import Metrics, record_of
from pipelinerl_common.stream import Stream
from pipelinerl_common.telemetry import memory_bytes

_PERIOD_S = 1.0


class RolloutMeter:
    """Counts of one actor since its start. Errors are counted by reason: retries, and trajectories
    and groups that are given up.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.num_tokens = 0
        self._tokens = metrics.counter("tokens_generated_total")
        self._completions = metrics.histogram("completion_tokens")
        self._samples = metrics.counter("samples_generated_total")
        self._published = metrics.counter("groups_published_total")
        self._group_seconds = metrics.histogram("group_seconds")
        self._failed = metrics.counter("groups_failed_total")
        self._errors = metrics.counter("rollout_errors_total")
        self._verifications = metrics.histogram("verification_seconds")
        self._seen: set[str] = set()

    def sampled(self, turns: Iterable[Turn]) -> None:
        for turn in turns:
            self.num_tokens += len(turn.token_ids)
            self._tokens.inc(len(turn.token_ids))
            self._completions.observe(len(turn.token_ids))

    def published(self, num_samples: int, seconds: float) -> None:
        """Counts a group that reached the stream `seconds` after its lease."""
        self._published.inc()
        self._samples.inc(num_samples)
        self._group_seconds.observe(seconds)

    def group_failed(self) -> None:
        self._failed.inc()

    def failed(self, reason: str, count: int = 1) -> bool:
        """Counts errors; true for the first of its reason."""
        self._errors.inc(count, reason=reason)
        is_first = reason not in self._seen
        self._seen.add(reason)
        return is_first

    @contextmanager
    def verifying(self) -> Iterator[None]:
        """Measures the time of the block."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._verifications.observe(time.monotonic() - began)


class MetricsReport:
    """Publishes the actor's metrics on the stream, once a second."""

    def __init__(
        self,
        meter: RolloutMeter,
        stream: Stream,
        *,
        instance: str,
        num_running: Callable[[], int],
        num_slots: int,
    ) -> None:
        self._meter = meter
        self._stream = stream
        self._instance = instance
        metrics = meter.metrics
        metrics.gauge("requests_running").read(lambda: float(num_running()))
        metrics.gauge("memory_bytes").read(memory_bytes)
        self._limit = metrics.gauge("requests_limit")
        self._limit.set(float(num_slots))
        self._rate = metrics.gauge("generation_tokens_per_second")
        self._events = metrics.counter("stream_events_total")
        self._last = (time.monotonic(), 0)

    async def run(self) -> None:
        """Consumes the meter, produces one record a second, waits for its period only; runs until
        cancelled.
        """
        while True:
            await asyncio.sleep(_PERIOD_S)
            (then, tokens_then), now = self._last, time.monotonic()
            self._last = (now, self._meter.num_tokens)
            self._rate.set((self._meter.num_tokens - tokens_then) / max(now - then, 1e-9))
            await self._publish()

    async def publish_last(self) -> None:
        """Publishes rates of zero: sums over the actors use each one's last record, and this actor
        generates nothing any more.
        """
        self._rate.set(0.0)
        self._limit.set(0.0)
        await self._publish()

    async def _publish(self) -> None:
        for event, count in self._stream.counters.items():
            self._events.reach(count, event=event)
        await self._stream.publish_metrics(record_of(self._meter.metrics, self._instance))
