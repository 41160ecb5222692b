"""How a session of a run ends, and tasks that end with it."""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from pipelinerl_cli.up.supervisor import Failure

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ending:
    """`status` as in summary.json: finished, interrupted or failed."""

    status: str
    failure: Failure | None = None
    never_began: bool = False
    """The preparation has found the input wrong: there is nothing to go on with."""


def ending_of(task: asyncio.Task[Any]) -> Ending:
    """A task that keeps something running ends with a Failure; the supervisor's with None when the
    run is finished.
    """
    if (error := task.exception()) is not None:  # a bug in one part must still end the run in order
        return Ending(
            "failed", Failure(task.get_name(), f"crashed: {type(error).__name__}: {error}")
        )
    failure = task.result()
    return Ending("finished") if failure is None else Ending("failed", failure)


def in_background(stack: AsyncExitStack, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A task that is cancelled, and waited for, when the stack unwinds. One that crashes says so at
    once.
    """
    task = asyncio.create_task(work, name=getattr(work, "__qualname__", None))
    task.add_done_callback(_say_crash)

    async def end() -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    stack.push_async_callback(end)
    return task


def _say_crash(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error(
            "%s crashed: %s: %s", task.get_name(), type(error).__name__, error, exc_info=error
        )
