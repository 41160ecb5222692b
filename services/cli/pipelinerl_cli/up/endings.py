"""The endings of a run, and background tasks that end with it."""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from pipelinerl_cli.up.supervisor import ProcessFailure

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunEnding:
    """`status` as in summary.json: finished, interrupted or failed."""

    status: str
    failure: ProcessFailure | None = None
    never_began: bool = False
    """The preparation has found the input wrong: there is nothing to resume."""


def ending_of(task: asyncio.Task[Any]) -> RunEnding:
    """The run's ending after `task`, which kept something running, has ended. Its result is a
    failure, or None when the run is finished.
    """
    if (error := task.exception()) is not None:  # a bug in one part must still end the run in order
        reason = f"crashed: {type(error).__name__}: {error}"
        return RunEnding("failed", ProcessFailure(task.get_name(), reason))
    failure = task.result()
    return RunEnding("finished") if failure is None else RunEnding("failed", failure)


def in_background(stack: AsyncExitStack, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Starts a task that is cancelled, and waited for, when the stack unwinds. A crash is logged at
    once.
    """
    task = asyncio.create_task(work, name=getattr(work, "__qualname__", None))
    task.add_done_callback(_log_crash)

    async def end() -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    stack.push_async_callback(end)
    return task


def _log_crash(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error(
            "%s crashed: %s: %s", task.get_name(), type(error).__name__, error, exc_info=error
        )
