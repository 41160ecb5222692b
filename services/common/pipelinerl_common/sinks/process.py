"""The supervisor of the sinks' process, in rank 0 of the trainer."""

import asyncio
import json
import logging
import signal
import sys

from pipelinerl_common.child_process import send_signal
from pipelinerl_common.metrics import Metrics
from pipelinerl_common.service import Wiring
from pipelinerl_common.settings import SinkSettings

log = logging.getLogger(__name__)

MOST_STARTS = 3
END_S = 20.0
"""Time for the last rows at the end of the run."""


class SinkProcess:
    """Supervises the sinks' process where the job names a sink. Its failures only appear in the
    trainer's log.
    """

    def __init__(self, settings: SinkSettings, wiring: Wiring, metrics: Metrics) -> None:
        self._rows = metrics.counter("sink_rows_total")
        self._wanted = any(sink is not None for sink in (settings.wandb, settings.tensorboard))
        self._wiring = wiring
        self._process: asyncio.subprocess.Process | None = None
        self._finishing = False

    async def run(self) -> None:
        """Starts the process, restarts it a few times when it ends by itself, and then waits until
        cancelled, since training needs no sinks.
        """
        for start in range(MOST_STARTS if self._wanted else 0):
            try:
                status = await self._run_once()
            except (OSError, ValueError) as error:  # no process, or a line without an end
                log.warning("sinks could not be started, or their output not be read: %s", error)
                break
            if self._finishing:
                break
            log.warning(
                "sinks ended with status %d, start %d of at most %d", status, start + 1, MOST_STARTS
            )
        await asyncio.Event().wait()

    async def finish(self) -> None:
        """Closes the process's input, so that it writes its last rows; kills it after `END_S`."""
        self._finishing = True
        process = self._process
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            log.warning("sinks have not finished within %g s and are killed", END_S)
            send_signal(process, signal.SIGKILL)

    async def _run_once(self) -> int:
        """Runs the process once and adds up its counts; returns its exit status."""
        pipe = asyncio.subprocess.PIPE
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command(), stdin=pipe, stdout=pipe
        )
        counted: dict[tuple[str, str], int] = {}  # by this process, which starts at 0
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                counts = _counts(line)
                for (sink, outcome), count in counts.items():
                    self._rows.inc(
                        count - counted.get((sink, outcome), 0), sink=sink, outcome=outcome
                    )
                counted.update(counts)
            return await process.wait()
        finally:
            send_signal(process, signal.SIGKILL)

    def _command(self) -> list[str]:
        wiring = self._wiring
        command = [
            *(sys.executable, "-m", "pipelinerl_common.sinks"),
            f"--job={wiring.job_file}",
            f"--output={wiring.output}",
            f"--name={wiring.name}-sinks",
            f"--nats-url={wiring.nats_url}",
            f"--log-level={wiring.log_level}",
        ]
        files = {
            "token-file": wiring.token_file,
            "nats-credentials": wiring.nats_credentials,
            "nats-ca-file": wiring.nats_ca_file,
        }
        return command + [f"--{flag}={file}" for flag, file in files.items() if file is not None]


def _counts(line: bytes) -> dict[tuple[str, str], int]:
    """Parses rows by sink and outcome; a line that a sink's library has printed has none."""
    try:
        return {
            (sink, what): int(count)
            for sink, each in json.loads(line).items()
            for what, count in each.items()
        }
    except (ValueError, AttributeError, TypeError):
        log.info("sinks: %s", line.decode(errors="replace").rstrip())
        return {}
