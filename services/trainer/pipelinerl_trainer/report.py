"""What the trainer tells about each step: one log line, and one record on the metrics stream."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping

from pipelinerl.v1 import metrics_pb2
from pipelinerl_common import stream
from pipelinerl_common.errors import Unavailable
from pipelinerl_common.settings import StreamSettings
from pipelinerl_common.telemetry import fields

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
MAX_WAITING = 1024
"""Records that are kept while the stream's server is away; the oldest are dropped beyond it."""

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
    "served_version",
    "wait_seconds",
    "train_seconds",
    "step_seconds",
)


class Reporter:
    """Lives in the event loop of rank 0."""

    def __init__(self, job: str, instance: str, namespace: str | None = None) -> None:
        self._job = job
        self._instance = instance
        self._namespace = namespace
        self._records: deque[metrics_pb2.MetricsRecord] = deque(maxlen=MAX_WAITING)
        self._wake = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self.num_dropped = 0

    def step_done(self, num_steps: int, values: Mapping[str, float]) -> None:
        """After `num_steps` optimizer steps. Event loop's thread."""
        log.info("step=%d %s", num_steps, fields(**{name: float(values[name]) for name in _LOGGED if name in values}))
        if len(self._records) == MAX_WAITING:
            self.num_dropped += 1
        self._records.append(
            metrics_pb2.MetricsRecord(
                schema_version=SCHEMA_VERSION,
                job=self._job,
                role="trainer",
                instance=self._instance,
                time=time.time(),
                step=num_steps,
                values=values,
            )
        )
        self._is_empty.clear()
        self._wake.set()

    async def run(self, url: str, settings: StreamSettings, login: stream.Login) -> None:
        """Publishes records for ever; while the server is away they wait. Raises SettingsError when it refuses the login."""
        while True:
            try:
                async with stream.connect(
                    url, self._job, settings, name=self._instance, namespace=self._namespace, login=login
                ) as connection:
                    await self._publish(connection)
            except Unavailable as error:
                log.warning("metrics are not published, trying again: %s", error)

    async def _publish(self, connection: stream.Stream) -> None:
        while True:
            while self._records:
                await connection.publish_metrics(self._records.popleft())
            self._is_empty.set()
            self._wake.clear()
            await self._wake.wait()

    async def finish(self, timeout_s: float) -> None:
        """Waits until every record has been published, within reason."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_empty.wait()
        except TimeoutError:
            log.warning("%d metrics records were not published", len(self._records))
