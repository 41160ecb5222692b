"""Metrics on their way from the stream to the file and the display."""

import asyncio
import logging
from collections.abc import Callable

from pipelinerl.v1 import metrics_pb2
from pipelinerl_cli.results.metrics_file import MetricsWriter, Record
from pipelinerl_common.errors import PipelineRLError
from pipelinerl_common.settings import Job
from pipelinerl_common.stream import Login, connect

log = logging.getLogger(__name__)

RETRY_S = 1.0


class Feed:
    """Consumes the run's metrics subject from its beginning, writes what is news, and hands it on."""

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
        """Until cancelled. Waits for the server while it is away; metrics are worth no more than
        that.
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
        """Waits until nothing has arrived for `quiet_s`, at most `timeout_s`: the last records are
        on their way at the end.
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
        stream_settings = self._job.spec.stream
        async with (
            connect(
                self._url,
                self._job.name,
                stream_settings,
                name="up",
                namespace=self._job.metadata.namespace,
                login=Login(token=self._token),
            ) as stream,
            stream.metrics() as records,
        ):
            async for record in records:
                self._take(to_record(record))

    def _take(self, record: Record) -> None:
        self._arrived.set()
        if self._writer.write(record):
            self._on_record(record)


def to_record(message: metrics_pb2.MetricsRecord) -> Record:
    return Record(message.role, message.instance, message.time, message.step, dict(message.values))
