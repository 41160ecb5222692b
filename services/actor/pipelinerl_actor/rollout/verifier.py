"""Runs a task's `verify` under its time limit: a coroutine here, a plain function in a process that
can be ended.

A verifier's process is handed the task's path, args and seed and makes its own task; a request
names a prompt by its index. So only JSON lines cross the pipe. Processes are started when needed,
at most `num_processes`, and ended after a time-out.

A process that runs a task's plain `verify`: JSON lines in on stdin, JSON lines out on stdout, in
order.

First {"path", "args", "seed", "sys_path"}, answered with {}; then {"prompt_index", "messages",
"turn"} each time, answered with {"reward", "metrics"}. `messages` are those that the policy saw: a
prompt that is another one here would be judged wrongly. Either may be answered with {"error",
"temporary"}. Ends with its stdin. What the task prints goes to stderr.
"""

import asyncio
import dataclasses
import inspect
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from typing import IO, Any

from pipelinerl_actor.rollout.failures import GivenUp, backoff_s, exhausted
from pipelinerl_actor.task import Prompt, Task, TaskName, Turn, Verdict
from pipelinerl_actor.task_loader import load_task
from pipelinerl_common.errors import FatalError, PipelineRLError, SettingsError, TemporaryError
from pipelinerl_common.types import FinishReason, VersionRun

log = logging.getLogger(__name__)

_START_S = 120.0
"""Longest time for a process to import the task."""


class Verifier:
    """`verify` for all trajectories of the job, at most `num_processes` plain ones at once."""

    def __init__(
        self,
        task: Task,
        name: TaskName,
        *,
        timeout_s: float,
        max_retries: int,
        num_processes: int | None = None,
    ) -> None:
        self._task = task
        self._name = name
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._in_loop = inspect.iscoroutinefunction(task.verify)
        self._idle: list[_Process] = []
        self._room = asyncio.Semaphore(num_processes or min(8, os.cpu_count() or 1))

    async def verify(self, prompt_index: int, prompt: Prompt, turn: Turn) -> Verdict:
        """Tries again after a TemporaryError, which verifiers that ask remote services raise.

        Raises GivenUp: "verifier_timeout", "verifier_error", "verifier_died",
        "verifier_unavailable".
        """
        num_failures = 0
        while True:
            try:
                if self._in_loop:
                    return await self._verify_here(prompt, turn)
                return await self._verify_in_process(prompt_index, prompt, turn)
            except TemporaryError as error:
                num_failures += 1
                if given_up := exhausted(
                    "verifier_unavailable", num_failures, self._max_retries, error
                ):
                    raise given_up from error
            await asyncio.sleep(backoff_s(num_failures))

    async def _verify_here(self, prompt: Prompt, turn: Turn) -> Verdict:
        try:
            async with asyncio.timeout(self._timeout_s):
                outcome = self._task.verify(prompt, turn)
                return await outcome if inspect.isawaitable(outcome) else outcome
        except TimeoutError as error:
            raise GivenUp(
                "verifier_timeout", f"verify took longer than {self._timeout_s:g} s"
            ) from error
        except (TemporaryError, GivenUp):
            raise
        except Exception as error:
            raise GivenUp("verifier_error", f"{type(error).__name__}: {error}") from error

    async def _verify_in_process(self, prompt_index: int, prompt: Prompt, turn: Turn) -> Verdict:
        question = {
            "prompt_index": prompt_index,
            "messages": prompt.messages,
            "turn": dataclasses.asdict(turn),
        }
        async with self._process() as process:
            try:
                async with asyncio.timeout(self._timeout_s):
                    answer = await process.ask(question)
            except TimeoutError as error:
                raise GivenUp(
                    "verifier_timeout",
                    f"verify took longer than {self._timeout_s:g} s, its process is ended",
                ) from error
        if "error" in answer:
            raise (
                TemporaryError(answer["error"])
                if answer["temporary"]
                else GivenUp("verifier_error", answer["error"])
            )
        return Verdict(answer["reward"], answer["metrics"])

    @asynccontextmanager
    async def _process(self) -> AsyncIterator["_Process"]:
        """A process of one's own. It is ended when the block raises, and kept for the next
        otherwise.
        """
        async with self._room:
            process = self._idle.pop() if self._idle else await _Process.start(self._name)
            try:
                yield process
            except BaseException:
                await process.end()
                raise
            self._idle.append(process)

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().end()


class _Process:
    """One `verifier_process`, asked one thing at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, name: TaskName) -> "_Process":
        """Raises FatalError when the task cannot be made there, although it could here."""
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "pipelinerl_actor.rollout.verifier_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the actor, which ends its processes
        )
        process = cls(child)
        hello = {
            "path": name.path,
            "args": dict(name.args),
            "seed": name.seed,
            "sys_path": sys.path,
        }
        try:
            async with asyncio.timeout(_START_S):
                answer = await process.ask(hello)
        except (GivenUp, TimeoutError) as error:
            await process.end()
            raise FatalError(
                f"the verifier's process for {name.path} does not start: {error!r}"
            ) from error
        except BaseException:
            await process.end()
            raise
        if "error" in answer:
            await process.end()
            raise FatalError(
                f"the verifier's process cannot make the task {name.path}: {answer['error']}"
            )
        return process

    async def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Raises GivenUp("verifier_died") when the process ends instead of answering."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(question).encode() + b"\n")
            await stdin.drain()
            line = await stdout.readline()
        except (OSError, ValueError) as error:  # a broken pipe; a line over the reader's limit
            raise GivenUp("verifier_died", f"the verifier's process is gone: {error}") from error
        if not line.endswith(b"\n"):
            raise GivenUp(
                "verifier_died",
                f"the verifier's process ended with status {await self._process.wait()}",
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def end(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


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
