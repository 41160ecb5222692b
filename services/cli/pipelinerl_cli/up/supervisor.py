"""When a process has ended: what to do about it. Pure.

Keeps the run's processes running.

```
 unit = one process, or all trainer ranks
 start -> first exit -> retired           it was asked to end
                     -> judge -> Done     trainers: the run is finished
                              -> Restart  after a growing delay, while the unit's budget lasts
                              -> GiveUp   the run fails with the last lines of the log
```

How a session of a run ends, and tasks that end with it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from pipelinerl_cli.up.process import LOG_PREFIX, LocalProcess
from pipelinerl_common.text import counted
from pipelinerl_control.plan import ENDING_ROLES, PlannedProcess, RestartScope, Role

EXIT_DONE, EXIT_SETTINGS = 0, 2


@dataclass(frozen=True, slots=True)
class Restart:
    reason: str


@dataclass(frozen=True, slots=True)
class Done:
    """The process has done what it was there for."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Starting it again would end the same way."""

    reason: str


def judge(
    role: Role, status: int, *, run_is_finished: Callable[[], bool]
) -> Restart | Done | GiveUp:
    """`status` is the exit status, negative for a signal. Trainers and the evaluator may end by
    themselves, their work done.
    """
    if status == EXIT_SETTINGS:
        return GiveUp("wrong settings")
    if status == EXIT_DONE:
        if role in ENDING_ROLES:
            return Done() if run_is_finished() else Restart("ended before the last step")
        return Restart("ended by itself")
    return Restart(
        f"was killed by signal {-status}" if status < 0 else f"crashed with status {status}"
    )


@dataclass
class RestartBudget:
    """At most `most` restarts within `window_s`; the wait before each doubles with the number of
    recent ones.
    """

    most: int = 5
    window_s: float = 600.0
    first_delay_s: float = 0.5
    _times: deque[float] = field(default_factory=deque)

    def spend(self, now: float) -> float | None:
        """Seconds to wait before the restart, or None when the budget is used up."""
        while self._times and now - self._times[0] > self.window_s:
            self._times.popleft()
        if len(self._times) >= self.most:
            return None
        delay = self.first_delay_s * 2.0 ** len(self._times)
        self._times.append(now)
        return delay


log = logging.getLogger(__name__)

PEER_GRACE_S = 5.0
"""A rank whose peer crashed hangs in a collective: it gets this long to end before it is killed."""
LAST_LINES = 15


@dataclass(frozen=True, slots=True)
class ProcessFailure:
    """Why the run cannot go on."""

    name: str
    reason: str
    last_lines: Sequence[str] = ()
    bad_input: bool = False
    """It is the user's input that is wrong."""

    @property
    def cause(self) -> str:
        """In one line: the last error of the log says more than its last line."""
        lines = [line for line in self.last_lines if " ERROR " in line] or self.last_lines
        return ": ".join(
            [f"{self.name} {self.reason}", *(LOG_PREFIX.sub("", line) for line in lines[-1:])]
        )

    def __str__(self) -> str:
        return "\n".join(
            [f"{self.name} {self.reason}", *(f"    {line}" for line in self.last_lines)]
        )


@dataclass
class _Unit:
    name: str
    role: Role
    workloads: tuple[PlannedProcess, ...]
    budget: RestartBudget = field(default_factory=RestartBudget)
    is_retired: bool = False
    """Its process is to end, and not to be started again."""


class Supervisor:
    """Processes of one run.

    `launch` starts one, `run_is_finished` tells whether trainers that ended had reached the last step, `on_restart` hears the
    name of every process that is restarted, or the role where all of it is.
    """

    def __init__(
        self,
        workloads: Iterable[PlannedProcess],
        launch: Callable[[PlannedProcess], Awaitable[LocalProcess]],
        run_is_finished: Callable[[], bool],
        on_restart: Callable[[str], None],
        budget: Callable[[], RestartBudget] = RestartBudget,
    ) -> None:
        self._on_restart = on_restart
        self._launch = launch
        self._run_is_finished = run_is_finished
        self._budget = budget
        self._first = tuple(workloads)
        self._kept: dict[asyncio.Task[ProcessFailure | None], _Unit] = {}
        self._ended: asyncio.Queue[asyncio.Task[ProcessFailure | None]] = asyncio.Queue()
        self._running: dict[str, LocalProcess] = {}
        self._stopping = False

    @property
    def running(self) -> dict[str, LocalProcess]:
        return {
            name: process for name, process in self._running.items() if process.exit_status is None
        }

    def _is_over(self, unit: _Unit) -> bool:
        return self._stopping or unit.is_retired

    async def run(self) -> ProcessFailure | None:
        """Starts everything and keeps it running. None when the trainers have finished the run, or
        when `stop` was called.
        """
        self.add(self._first)
        try:
            while self._kept:
                task = await self._ended.get()
                unit = self._kept.pop(task)
                failure = task.result()
                if failure is not None or unit.role is Role.TRAINER or self._stopping:
                    return failure
            return None
        finally:
            for task in self._kept:
                task.cancel()
            await asyncio.gather(*self._kept, return_exceptions=True)

    def add(self, workloads: Iterable[PlannedProcess]) -> None:
        """Starts these, too, and keeps them running; nothing once the run is being stopped."""
        if self._stopping:
            return
        for unit in _units(workloads, self._budget):
            task = asyncio.create_task(self._keep(unit), name=f"keep {unit.name}")
            self._kept[task] = unit
            task.add_done_callback(self._ended.put_nowait)

    async def retire(self, name: str, grace_s: float) -> None:
        """Ends one process for good: SIGTERM, and SIGKILL when it has not ended after `grace_s`.
        Returns when it has ended.
        """
        kept = next((task for task, unit in self._kept.items() if unit.name == name), None)
        if kept is None:
            return
        self._kept[kept].is_retired = True
        process = self.running.get(name)
        if process is not None:
            status = await process.stop(grace_s)
            log.info("%s was let go and ended with status %d", name, status)
        await asyncio.wait({kept})

    async def stop(self, grace_s: dict[Role, float]) -> None:
        """SIGTERM role by role in the order given, each with its grace; nothing is restarted from
        here on.
        """
        self._stopping = True
        for role, grace in grace_s.items():
            processes = [
                p for name, p in self.running.items() if Role(name.partition("-")[0]) is role
            ]
            await asyncio.gather(*(process.stop(grace) for process in processes))

    def end(self, name: str) -> None:
        """Ends one process, which is then started again like one that has crashed."""
        if name in self.running:
            self._running[name].kill()

    def kill(self) -> None:
        """Ends everything at once."""
        self._stopping = True
        for process in self.running.values():
            process.kill()

    async def _keep(self, unit: _Unit) -> ProcessFailure | None:
        while not self._is_over(unit):
            processes = [await self._start(workload, unit) for workload in unit.workloads]
            culprit, status = await _first_failure_or_all(processes)
            if self._is_over(unit):
                return None
            verdict = judge(unit.role, status, run_is_finished=self._run_is_finished)
            if isinstance(verdict, Done):
                return None
            failure = await self._prepare_restart(unit, culprit, verdict)
            if failure is not None:
                return failure
        return None

    async def _prepare_restart(
        self, unit: _Unit, culprit: LocalProcess, verdict: Restart | GiveUp
    ) -> ProcessFailure | None:
        if isinstance(verdict, GiveUp):
            return ProcessFailure(
                culprit.name,
                f"cannot run: {verdict.reason}",
                culprit.last_lines(LAST_LINES),
                bad_input=True,
            )
        delay = unit.budget.spend(asyncio.get_running_loop().time())
        if delay is None:
            reason = (
                f"{verdict.reason}, restarted {counted(unit.budget.most, 'time')} within "
                f"{unit.budget.window_s:g} s"
            )
            return ProcessFailure(culprit.name, reason, culprit.last_lines(LAST_LINES))
        self._on_restart(unit.name)
        log.warning(
            "%s %s; %s starts again in %g s", culprit.name, verdict.reason, unit.name, delay
        )
        await asyncio.sleep(delay)
        return None

    async def _start(self, workload: PlannedProcess, unit: _Unit) -> LocalProcess:
        process = await self._launch(workload)
        self._running[workload.name] = process
        if self._is_over(unit):
            process.terminate()
        return process


def _units(workloads: Iterable[PlannedProcess], budget: Callable[[], RestartBudget]) -> list[_Unit]:
    """One per process, or one per role where the role restarts together."""
    groups: dict[str, list[PlannedProcess]] = {}
    for workload in workloads:
        together = workload.restart_scope is RestartScope.ROLE
        groups.setdefault(f"{workload.role.value}s" if together else workload.name, []).append(
            workload
        )
    return [
        _Unit(
            members[0].name if len(members) == 1 else name,
            members[0].role,
            tuple(members),
            budget(),
        )
        for name, members in groups.items()
    ]


async def _first_failure_or_all(processes: Sequence[LocalProcess]) -> tuple[LocalProcess, int]:
    """The first process to fail, once all have ended (its peers are ended), or the first one when
    all ended with 0.
    """
    waits = {asyncio.create_task(process.wait()): process for process in processes}
    pending = set(waits)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            failed = next((task for task in done if task.result() != 0), None)
            if failed is not None:
                await asyncio.gather(
                    *(
                        process.stop(PEER_GRACE_S)
                        for process in processes
                        if process is not waits[failed]
                    )
                )
                return waits[failed], failed.result()
        return processes[0], 0
    finally:
        for task in pending:
            task.cancel()


@dataclass(frozen=True, slots=True)
class RunEnding:
    """`status` as in summary.json: finished, interrupted or failed."""

    status: str
    failure: ProcessFailure | None = None
    never_began: bool = False
    """The preparation has found the input wrong: there is nothing to go on with."""


def ending_of(task: asyncio.Task[Any]) -> RunEnding:
    """A task that keeps something running ends with a Failure; the supervisor's with None when the
    run is finished.
    """
    if (error := task.exception()) is not None:  # a bug in one part must still end the run in order
        return RunEnding(
            "failed", ProcessFailure(task.get_name(), f"crashed: {type(error).__name__}: {error}")
        )
    failure = task.result()
    return RunEnding("finished") if failure is None else RunEnding("failed", failure)


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
