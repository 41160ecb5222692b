"""`python -m pipelinerl_actor.prepare --job job.yaml --output DIR`: makes or fetches a job's model,
checks it and installs it as `<DIR>/model`.

Run once before a job's services start; a second run changes nothing.
"""

import argparse
import logging
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipelinerl_actor.models.chat import chat_token_ids
from pipelinerl_actor.task import Task, TaskName
from pipelinerl_common.checkpoints import MODEL
from pipelinerl_common.errors import PipelineRLError, SettingsError
from pipelinerl_common.service import EXIT_CRASHED, EXIT_DONE, EXIT_SETTINGS, program
from pipelinerl_common.settings import TaskSettings, load_job
from pipelinerl_common.telemetry import LEVELS, configure_logging, fields
from pipelinerl_common.text import counted

log = logging.getLogger(__name__)

NUM_PROMPTS = 32
"""Number of the task's prompts that are tried."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=program(), description="Fetches or makes the model of one PipelineRL job."
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
    # As an exception, so that what is half made is removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        prepare(flags)
    except PipelineRLError as error:
        log.error("failed", exc_info=error)
        return EXIT_SETTINGS if isinstance(error, SettingsError) else EXIT_CRASHED
    return EXIT_DONE


def prepare(flags: argparse.Namespace) -> Path:
    """Resolves the job's model and installs it. Raises SettingsError or Unavailable."""
    from transformers.utils import logging as transformers_logging

    from pipelinerl_actor.models.source import ModelSource, install_model
    from pipelinerl_actor.task_loader import load_task

    transformers_logging.disable_progress_bar()
    job = load_job(flags.job)
    # Tasks before the model: their errors appear before a download of many minutes.
    task = (
        load_task(TaskName(job.spec.task.path, job.spec.task.args, job.spec.seed))
        if flags.check_task
        else None
    )
    if flags.check_sets:
        from pipelinerl_actor.evaluation.evaluate import make_sets

        make_sets(job)
    started = time.monotonic()
    log.info(fields(model=job.spec.model.uri, preparing=flags.output / MODEL))
    source = ModelSource(flags.cache, offline=flags.offline).resolve(job.spec.model)
    target = install_model(source, flags.output, copy=flags.copy)
    log.info(fields(model=target, source=source, seconds=time.monotonic() - started))
    if task is not None:
        check_prompts(task, job.spec.task, job.spec.model.max_model_len, target)
    return target


def check_prompts(task: Task, settings: TaskSettings, max_model_len: int, model: Path) -> None:
    """Raises SettingsError when none of the task's first prompts can be made, rendered, and
    answered within the context.

    Single ones that cannot are only logged: the job drops and counts them. A task with a rollout of
    its own, which chooses its requests itself, is not tried.
    """
    # Its requests are only known when it runs.
    if type(task).rollout is not Task.rollout:
        return
    room = max_model_len - settings.sampling.max_tokens
    lengths: list[int] = []
    faults: list[str] = []
    for outcome in _tried(task, _tokenizer(model)):
        if isinstance(outcome, int):
            lengths.append(outcome)
        else:
            faults.append(outcome)
    if not lengths:
        raise SettingsError(
            f"spec.task.path={settings.path!r}: none of its first {NUM_PROMPTS} prompts can be "
            f"used: {faults[0]}"
        )
    if min(lengths) > room:
        raise SettingsError(
            f"model.maxModelLen={max_model_len} is too small for the prompts of "
            f"spec.task.path={settings.path!r} with "
            f"task.sampling.maxTokens={settings.sampling.max_tokens}: of the first {NUM_PROMPTS} "
            f"the shortest has {counted(min(lengths), 'token')}, the longest {max(lengths)}. Set "
            f"model.maxModelLen to at least {max(lengths) + settings.sampling.max_tokens} (and "
            "trainers.microBatchTokens to no less), lower task.sampling.maxTokens, or shorten the "
            "prompts"
        )
    if too_long := sum(length > room for length in lengths):
        log.warning(
            "%d of the first %d prompts leave no room for task.sampling.maxTokens=%d in "
            "model.maxModelLen=%d: they are dropped",
            too_long,
            NUM_PROMPTS,
            settings.sampling.max_tokens,
            max_model_len,
        )
    if faults:
        log.warning(
            "%d of the first %d prompts cannot be used and will be dropped: %s",
            len(faults),
            NUM_PROMPTS,
            faults[0],
        )


def _tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except Exception as error:  # of many kinds, by what the folder lacks
        raise SettingsError(
            f"{model}: its tokenizer cannot be loaded: {error}; give a model in Hugging Face format"
        ) from error


def _tried(task: Task, tokenizer: Any) -> Iterator[int | str]:
    """The number of tokens of each prompt, or the reason why it cannot be used."""
    for index in range(NUM_PROMPTS):
        try:
            messages = task.prompt(index).messages
        except Exception as error:  # noqa: BLE001 - the task's code
            yield f"prompt({index}) raises {type(error).__name__}: {error}"
            continue
        try:
            yield len(chat_token_ids(tokenizer, list(messages)))
        except Exception as error:  # noqa: BLE001 - the template's code
            yield f"the model's chat template refuses prompt({index}): {error}"


if __name__ == "__main__":
    sys.exit(main())
