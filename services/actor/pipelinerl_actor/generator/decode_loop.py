"""The thread that decodes with a transformers model.

Round by round it takes every running sequence one token further. Between two rounds it looks for
what else is to be done (a pause, a command), so all sequences stand at a token boundary then.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from pipelinerl_actor.generator.engine import Completion
from pipelinerl_actor.generator.load import StepClock
from pipelinerl_actor.generator.transformers_model import Sequence, TransformersModel
from pipelinerl_common.errors import FatalError

Result = TypeVar("Result")

_IDLE_S = 0.05


@dataclass(eq=False, slots=True)
class Job:
    """A sequence that a caller waits for."""

    sequence: Sequence
    done: "Future[Completion]"
    stop: asyncio.Event | None = None

    @property
    def is_stopped(self) -> bool:
        return self.stop is not None and self.stop.is_set()

    def end(self) -> None:
        if self.done.set_running_or_notify_cancel():
            self.done.set_result(self.sequence.completion())


class DecodeLoop:
    """The decoding thread and the commands to it."""

    def __init__(
        self, model: TransformersModel, max_running: int, version: Callable[[], int]
    ) -> None:
        self._model = model
        self._max_running = max_running
        self._version = version
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: list[Job] = []
        self._waiting: list[Job] = []
        self._computations: list[Callable[[], None]] = []
        self._paused = False
        self._stopping = False
        self.clock = StepClock()
        self.fault: Future[str] = Future()
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._commands.put(self._stop)
        self._thread.join()

    def submit(self, job: Job) -> None:
        self._commands.put(lambda: self._waiting.append(job))

    async def call(self, function: Callable[[], Result]) -> Result:
        """Runs it on the decoding thread, between two tokens, also during a pause."""
        command, done = _answered(function)
        self._commands.put(command)
        return await asyncio.wrap_future(done)

    async def compute(self, function: Callable[[], Result]) -> Result:
        """Runs what uses the weights, never during a pause."""
        command, done = _answered(function)
        self._commands.put(lambda: self._computations.append(command))
        return await asyncio.wrap_future(done)

    async def pause(self) -> None:
        def command() -> None:
            self._paused = True
            self.clock.interrupted()

        await self.call(command)

    def resume(self) -> None:
        def command() -> None:
            self._paused = False

        self._commands.put(command)

    async def advance(self, num_rounds: int) -> None:
        """Paused: runs so many rounds and stands still again. What was submitted before takes part."""

        def command() -> None:
            self._paused = False
            for _ in range(num_rounds):
                self._admit()
                self._round()
            self._paused = True
            self.clock.interrupted()

        await self.call(command)

    def drop_caches(self) -> None:
        for job in self._running:
            job.sequence.cache = None

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._obey()
                self._admit()
                if not self._paused:
                    self._round()
        except Exception as error:  # noqa: BLE001 - `watch` raises it
            self.fault.set_result(f"{type(error).__name__}: {error}")
        for job in self._running + self._waiting:
            if job.done.set_running_or_notify_cancel():
                job.done.set_exception(FatalError("decoding ended"))

    def _obey(self) -> None:
        """Everything that was asked for; waits a moment when there is nothing else to do."""
        idle = self._paused or not (self._running or self._waiting or self._computations)
        try:
            self._commands.get(timeout=_IDLE_S if idle else 0)()
            while not self._stopping:
                self._commands.get_nowait()()
        except queue.Empty:
            pass

    def _admit(self) -> None:
        for job in self._waiting:
            if job.is_stopped:
                job.sequence.finish_reason = "abort"
                job.end()
        self._waiting = [
            job for job in self._waiting if not job.done.cancelled() and not job.is_stopped
        ]
        while self._waiting and len(self._running) < self._max_running and not self._paused:
            self._running.append(self._waiting.pop(0))

    def _round(self) -> None:
        """What waits to be computed, then one token for every running sequence."""
        computations, self._computations = self._computations, []
        for command in computations:
            command()
        still: list[Job] = []
        version = self._version()
        num_tokens = num_prefilled = 0
        for job in self._running:
            if job.done.cancelled():
                continue
            if job.is_stopped:
                job.sequence.finish_reason = "abort"
                job.end()
                continue
            num_tokens += 1
            num_prefilled += len(job.sequence.prompt) if job.sequence.cache is None else 0
            self._model.step(job.sequence, version)
            if job.sequence.finish_reason is None:
                still.append(job)
            else:
                job.end()
        if self._running:
            self.clock.stepped(
                num_running=len(still),
                num_waiting=len(self._waiting),
                num_tokens=num_tokens,
                num_prefilled=num_prefilled,
            )
        self._running = still


def _answered(function: Callable[[], Result]) -> tuple[Callable[[], None], "Future[Result]"]:
    """`function` as a command whose result or error goes into the future."""
    done: Future[Result] = Future()

    def command() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(function())
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            done.set_exception(error)

    return command, done
