"""Puts the evaluator together from its job and its wiring, and runs it."""

import asyncio
import logging
from pathlib import Path

from pipelinerl_actor.evaluation.loop import EvaluationLoop
from pipelinerl_actor.evaluation.report import EvaluationReport
from pipelinerl_actor.evaluation.results import Result
from pipelinerl_actor.evaluation.sets import make_sets
from pipelinerl_common import stream
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.metrics import serve_metrics
from pipelinerl_common.service import Wiring, cancel_all, run_until_first
from pipelinerl_common.settings import load_job

log = logging.getLogger(__name__)


async def run_evaluator(wiring: Wiring, stop: asyncio.Event, last_result: Path | None) -> None:
    """Until the run's last step is evaluated, or `stop` is set, which ends a running evaluation
    without a result.

    `last_result` gets the last step's result in words. Raises SettingsError for a set or wiring that cannot work.
    """
    job = load_job(wiring.job_file)
    settings = job.spec.evaluation
    if settings is None:
        raise SettingsError(f"--name {wiring.name}: the job has no spec.evaluation")
    tasks = make_sets(job)
    async with stream.connect(
        wiring.nats_url,
        job.name,
        job.spec.stream,
        name=wiring.name,
        namespace=job.metadata.namespace,
        login=stream.Login.of(wiring),
    ) as connection:
        report = EvaluationReport(job, settings, wiring.name, connection)
        loop = EvaluationLoop(job.spec, settings, wiring, report, tasks)
        async with serve_metrics(wiring.metrics_listen, report.metrics.exposition):
            working = asyncio.create_task(run_until_first(loop.run(), report.run()))
            stopping = asyncio.create_task(stop.wait())
            try:
                await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    _tell(working.result(), last_result)
            finally:
                await cancel_all([working, stopping])


def _tell(result: Result | None, file: Path | None) -> None:
    """For whoever reads how the process ended. A file that cannot be written is logged."""
    log.info("the last step is evaluated")
    if file is None or result is None:
        return
    try:
        file.write_text(str(result), encoding="utf-8")
    except OSError as error:
        log.warning("the last result is not written: %s", error)
