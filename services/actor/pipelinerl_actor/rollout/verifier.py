"""Runs a task's `verify` under its time limit: a coroutine in the rollout loop, a plain function in
a separate process, which can be killed.

    Verifier --{"path", "args", "seed", "sys_path"}-->     this module as a process: JSON lines
             <--{}-----------------------------------     on stdin, answers on stdout, in order;
             --{"prompt_index", "messages", "turn"}-->     ends with its stdin
             <--{"reward", "metrics"}-----------------

The process makes its own task, and a request names a prompt by its index, so that only JSON crosses
the pipe. `messages` are those that the policy saw: a prompt that differs in the process would be
judged wrongly. Any answer may be {"error", "temporary"} instead. What the task prints goes to
stderr. Processes are started when needed, at most `num_processes`, and killed after a time-out.
"""

import asyncio
import dataclasses
import inspect
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import IO, Any

from pipelinerl_actor.rollout.failures import GivenUp, Retries
from pipelinerl_actor.task import Prompt, Task, TaskName, Turn, Verdict
from pipelinerl_actor.task_loader import load_task
from pipelinerl_common.child_process import send_signal
from pipelinerl_common.errors import FatalError, PipelineRLError, SettingsError, TemporaryError
from pipelinerl_common.types import FinishReason, VersionRun

log = logging.getLogger(__name__)

_START_S = 120.0
"""Longest time for a process to import the task."""


class Verifier:
    """Verifies the answers of a job's trajectories, in at most `num_processes` processes."""

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
        """Retries after a TemporaryError, which verifiers that call remote services raise.

        Raises GivenUp: "verifier_timeout", "verifier_error", "verifier_died",
        "verifier_unavailable".
        """
        retries = Retries("verifier_unavailable", self._max_retries)
        while True:
            try:
                if self._in_loop:
                    return await self._verify_here(prompt, turn)
                return await self._verify_in_process(prompt_index, prompt, turn)
            except TemporaryError as error:
                await retries.wait(error)

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
            if answer["temporary"]:
                raise TemporaryError(answer["error"])
            raise GivenUp("verifier_error", answer["error"])
        return Verdict(answer["reward"], answer["metrics"])

    @asynccontextmanager
    async def _process(self) -> AsyncIterator["_Process"]:
        """A process for one question. It is reused, unless the block raises."""
        async with self._room:
            process = self._idle.pop() if self._idle else await _Process.start(self._name)
            try:
                yield process
            except BaseException:
                # It may be in the middle of an answer, which would go to the next question.
                await process.end()
                raise
            self._idle.append(process)

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().end()


class _Process:
    """One verifier's process, which answers one question at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, name: TaskName) -> "_Process":
        """Raises FatalError when the task cannot be made there, although it could here."""
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pipelinerl_actor.rollout.verifier"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the actor, which ends its processes
        )
        process = cls(child)
        try:
            await process._make_task(name)
        except BaseException:
            await process.end()
            raise
        return process

    async def _make_task(self, name: TaskName) -> None:
        hello = {
            "path": name.path,
            "args": dict(name.args),
            "seed": name.seed,
            "sys_path": sys.path,
        }
        try:
            async with asyncio.timeout(_START_S):
                answer = await self.ask(hello)
        except (GivenUp, TimeoutError) as error:
            raise FatalError(
                f"the verifier's process for {name.path} does not start: {error!r}"
            ) from error
        if "error" in answer:
            raise FatalError(
                f"the verifier's process cannot make the task {name.path}: {answer['error']}"
            )

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
            status = await self._process.wait()
            raise GivenUp("verifier_died", f"the verifier's process ended with status {status}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def end(self) -> None:
        send_signal(self._process, signal.SIGKILL)
        await self._process.wait()


def main() -> None:
    """The verifier's process."""
    # stdout carries answers only: what the task prints there goes to stderr.
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
                "follow from the index, the args and the seed"
            )
        verdict: Any = task.verify(prompt, _turn(question["turn"]))
        if inspect.isawaitable(verdict):  # of a plain function, for example a decorated one
            verdict = asyncio.run(_awaited(verdict))
        return {
            "reward": float(verdict.reward),
            "metrics": {str(name): float(value) for name, value in verdict.metrics.items()},
        }
    except Exception as error:  # noqa: BLE001 - the task's code: any error is one trajectory's
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
