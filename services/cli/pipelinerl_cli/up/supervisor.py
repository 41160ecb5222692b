"""Keeps the run's processes running.

```
 unit = one process, or all trainer ranks
 start -> first exit -> retired           it was asked to end
                     -> judge -> Done     trainers: the run is finished
                              -> Restart  after a growing delay, while the unit's budget lasts
                              -> GiveUp   the run fails with the last lines of the log
```
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pipelinerl_cli.up.process import LOG_PREFIX, Process
from pipelinerl_cli.up.restarts import Done, GiveUp, Restart, RestartBudget, judge
from pipelinerl_common.words import counted
from pipelinerl_operator.plan import RestartScope, Role, Workload

log = logging.getLogger(__name__)

PEER_GRACE_S = 5.0
"""A rank whose peer crashed hangs in a collective: it gets this long to end before it is killed."""
LAST_LINES = 15


@dataclass(frozen=True, slots=True)
class Failure:
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
    workloads: tuple[Workload, ...]
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
        workloads: Iterable[Workload],
        launch: Callable[[Workload], Awaitable[Process]],
        run_is_finished: Callable[[], bool],
        on_restart: Callable[[str], None],
        budget: Callable[[], RestartBudget] = RestartBudget,
    ) -> None:
        self._on_restart = on_restart
        self._launch = launch
        self._run_is_finished = run_is_finished
        self._budget = budget
        self._first = tuple(workloads)
        self._kept: dict[asyncio.Task[Failure | None], _Unit] = {}
        self._ended: asyncio.Queue[asyncio.Task[Failure | None]] = asyncio.Queue()
        self._running: dict[str, Process] = {}
        self._stopping = False

    @property
    def running(self) -> dict[str, Process]:
        return {
            name: process for name, process in self._running.items() if process.exit_status is None
        }

    def _is_over(self, unit: _Unit) -> bool:
        return self._stopping or unit.is_retired

    async def run(self) -> Failure | None:
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

    def add(self, workloads: Iterable[Workload]) -> None:
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

    async def _keep(self, unit: _Unit) -> Failure | None:
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
        self, unit: _Unit, culprit: Process, verdict: Restart | GiveUp
    ) -> Failure | None:
        if isinstance(verdict, GiveUp):
            return Failure(
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
            return Failure(culprit.name, reason, culprit.last_lines(LAST_LINES))
        self._on_restart(unit.name)
        log.warning(
            "%s %s; %s starts again in %g s", culprit.name, verdict.reason, unit.name, delay
        )
        await asyncio.sleep(delay)
        return None

    async def _start(self, workload: Workload, unit: _Unit) -> Process:
        process = await self._launch(workload)
        self._running[workload.name] = process
        if self._is_over(unit):
            process.terminate()
        return process


def _units(workloads: Iterable[Workload], budget: Callable[[], RestartBudget]) -> list[_Unit]:
    """One per process, or one per role where the role restarts together."""
    groups: dict[str, list[Workload]] = {}
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


async def _first_failure_or_all(processes: Sequence[Process]) -> tuple[Process, int]:
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
