"""What the actor counts, and the record that it publishes about every second."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable

from pipelinerl.v1.metrics_pb2 import MetricsRecord
from pipelinerl_actor.task import Turn
from pipelinerl_common.stream import Stream
from pipelinerl_common.telemetry import memory_bytes

_PERIOD_S = 1.0


class Meter:
    """Totals since the start. `rollout_errors` are by reason: retries, trajectories and groups given up."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_turns = 0
        self.num_samples = 0
        self.num_groups_published = 0
        self.num_groups_failed = 0
        self.errors: Counter[str] = Counter()

    def sampled(self, turns: Iterable[Turn]) -> None:
        for turn in turns:
            self.num_turns += 1
            self.num_tokens += len(turn.token_ids)

    def failed(self, reason: str, count: int = 1) -> None:
        self.errors[reason] += count

    def totals(self) -> dict[str, float]:
        return {
            "tokens_generated_total": self.num_tokens,
            "samples_total": self.num_samples,
            "groups_published_total": self.num_groups_published,
            "groups_failed_total": self.num_groups_failed,
            **{f"rollout_errors_{reason}_total": count for reason, count in self.errors.items()},
        }


class MetricsReport:
    """Publishes the meter's totals, the rates since the last record, and the gauges."""

    def __init__(self, meter: Meter, stream: Stream, *, job: str, instance: str, num_running: Callable[[], int]) -> None:
        self._meter = meter
        self._stream = stream
        self._job = job
        self._instance = instance
        self._num_running = num_running
        self._last = (time.monotonic(), 0, 0)

    async def run(self) -> None:
        """Consumes the meter, produces one record a second, waits for nothing else, never ends."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            await self.publish()

    async def publish(self) -> None:
        record = MetricsRecord(
            schema_version=1, job=self._job, role="actor", instance=self._instance, time=time.time(), step=-1
        )
        record.values.update(self._values())
        await self._stream.publish_metrics(record)

    def _values(self) -> dict[str, float]:
        meter, (then, tokens_then, turns_then) = self._meter, self._last
        now = time.monotonic()
        num_tokens, num_turns = meter.num_tokens - tokens_then, meter.num_turns - turns_then
        self._last = (now, meter.num_tokens, meter.num_turns)
        values = {
            **meter.totals(),
            "requests_running": self._num_running(),
            "generation_tokens_per_second": num_tokens / max(now - then, 1e-9),
            "memory_bytes": memory_bytes(),
        }
        if num_turns:
            values["completion_length_mean"] = num_tokens / num_turns
        return values
