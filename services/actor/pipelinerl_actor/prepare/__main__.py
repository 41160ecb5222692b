"""`python -m pipelinerl_actor.prepare --job job.yaml --output DIR`: `<DIR>/model` becomes the job's
model, checked.

Run once before a job's services start; doing it again changes nothing.
"""

import argparse
import logging
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pipelinerl_common.checkpoints import MODEL
from pipelinerl_common.errors import PipelineRLError, SettingsError
from pipelinerl_common.service import EXIT_CRASHED, EXIT_DONE, EXIT_SETTINGS
from pipelinerl_common.settings import load_job
from pipelinerl_common.telemetry import LEVELS, configure_logging, fields

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="pipelinerl prepare", description="Fetches or makes the model of one PipelineRL job."
    )
    parser.add_argument("--job", type=Path, required=True, help="the job file")
    parser.add_argument(
        "--output", type=Path, required=True, help="folder that gets the model, as <output>/model"
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path.home() / ".cache" / "pipelinerl",
        help="where made models are kept",
    )
    parser.add_argument(
        "--copy",
        action="store_true",
        help="copy instead of linking, for an output that other machines read",
    )
    parser.add_argument(
        "--check-task",
        action="store_true",
        help="make the job's task first, and try some of its prompts",
    )
    parser.add_argument(
        "--check-sets",
        action="store_true",
        help="make the tasks of the job's evaluation sets, likewise",
    )
    parser.add_argument("--offline", action="store_true", help="download nothing")
    parser.add_argument("--log-level", choices=LEVELS, default="info")
    flags = parser.parse_args(argv)

    configure_logging("prepare", flags.log_level)
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # so that what is half made is removed
    try:
        prepare(flags)
    except PipelineRLError as error:
        log.error("failed", exc_info=error)
        return EXIT_SETTINGS if isinstance(error, SettingsError) else EXIT_CRASHED
    return EXIT_DONE


def prepare(flags: argparse.Namespace) -> Path:
    """Resolves the job's model and installs it. Raises SettingsError or Unavailable."""
    from transformers.utils import logging as transformers_logging

    from pipelinerl_actor.models.install import install_model
    from pipelinerl_actor.models.source import ModelSource
    from pipelinerl_actor.prepare.prompts import check_prompts
    from pipelinerl_actor.task import TaskName
    from pipelinerl_actor.task_loader import load_task

    transformers_logging.disable_progress_bar()
    job = load_job(flags.job)
    task = (
        load_task(TaskName(job.spec.task.path, job.spec.task.args, job.spec.seed))
        if flags.check_task
        else None
    )
    if flags.check_sets:
        from pipelinerl_actor.evaluation.sets import make_sets

        make_sets(job)
    started = time.monotonic()
    log.info(fields(model=job.spec.model.uri, preparing=flags.output / MODEL))
    source = ModelSource(flags.cache, offline=flags.offline).resolve(job.spec.model)
    target = install_model(source, flags.output, copy=flags.copy)
    log.info(fields(model=target, source=source, seconds=time.monotonic() - started))
    if task is not None:
        check_prompts(task, job.spec.task, job.spec.model.max_model_len, target)
    return target


if __name__ == "__main__":
    sys.exit(main())
