"""Whether a task's prompts can be answered at all, before anything is generated."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelinerl_actor.models.chat import chat_token_ids
from pipelinerl_actor.task import Task
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import TaskSettings
from pipelinerl_common.text import counted

log = logging.getLogger(__name__)

NUM_PROMPTS = 32
"""The task's first ones are tried."""


def check_prompts(task: Task, settings: TaskSettings, max_model_len: int, model: Path) -> None:
    """Raises SettingsError when not one of the task's first prompts can be made, rendered, and
    answered within the context.

    Single ones that cannot are dropped and counted while the job runs, so they are only told in the
    log. A task with a rollout of its own, which decides itself what it asks for, is not tried.
    """
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
            "the shortest has "
            f"{counted(min(lengths), 'token')}, the longest {max(lengths)}. Set model.maxModelLen "
            "to at least "
            f"{max(lengths) + settings.sampling.max_tokens} (and trainers.microBatchTokens to no "
            "less), lower "
            "task.sampling.maxTokens, or shorten the prompts"
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
    """For each prompt its tokens, or what is wrong with it."""
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
