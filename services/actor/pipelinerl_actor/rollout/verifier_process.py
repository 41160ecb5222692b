"""A process that runs a task's plain `verify`: JSON lines in on stdin, JSON lines out on stdout, in
order.

First {"path", "args", "seed", "sys_path"}, answered with {}; then {"prompt_index", "messages",
"turn"} each time, answered with {"reward", "metrics"}. `messages` are those that the policy saw: a
prompt that is another one here would be judged wrongly. Either may be answered with {"error",
"temporary"}. Ends with its stdin. What the task prints goes to stderr.
"""

import asyncio
import inspect
import json
import os
import sys
from collections.abc import Awaitable
from typing import IO, Any

from pipelinerl_actor.task import Task, TaskName, Turn
from pipelinerl_actor.task_loader import load_task
from pipelinerl_common.errors import PipelineRLError, SettingsError, TemporaryError
from pipelinerl_common.types import FinishReason, VersionRun


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    hello = json.loads(sys.stdin.buffer.readline() or b"null")
    if hello is None:
        return
    sys.path[:] = hello["sys_path"]
    try:
        task = load_task(TaskName(hello["path"], hello["args"], hello["seed"]))
    except PipelineRLError as error:
        _answer(answers, {"error": str(error), "temporary": False})
        return
    _answer(answers, {})
    for line in sys.stdin.buffer:
        _answer(answers, _verdict(task, json.loads(line)))


def _answer(answers: IO[str], answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _verdict(task: Task, question: dict[str, Any]) -> dict[str, Any]:
    try:
        prompt = task.prompt(question["prompt_index"])
        if list(prompt.messages) != question["messages"]:
            raise SettingsError(
                f"prompt({question['prompt_index']}) is not the same in two processes; it must "
                "follow from the index, the args "
                f"and the seed"
            )
        verdict: Any = task.verify(prompt, _turn(question["turn"]))
        if inspect.isawaitable(
            verdict
        ):  # a plain function that returns a coroutine, for example a decorated one
            verdict = asyncio.run(_awaited(verdict))
        return {
            "reward": float(verdict.reward),
            "metrics": {str(name): float(value) for name, value in verdict.metrics.items()},
        }
    except Exception as error:  # noqa: BLE001 - the task's code: whatever it raises counts against one trajectory
        return {
            "error": f"{type(error).__name__}: {error}"[:2000],
            "temporary": isinstance(error, TemporaryError),
        }


async def _awaited(verdict: Awaitable[Any]) -> Any:
    return await verdict


def _turn(fields: dict[str, Any]) -> Turn:
    return Turn(
        text=fields["text"],
        token_ids=tuple(fields["token_ids"]),
        logprobs=tuple(fields["logprobs"]),
        version_runs=tuple(VersionRun(**run) for run in fields["version_runs"]),
        finish_reason=FinishReason(fields["finish_reason"]),
    )


if __name__ == "__main__":
    main()
