"""Keeps the run's processes running.

```
 unit = one process, or all trainer ranks
 start -> first exit -> retired           it was asked to end
                     -> judge -> Done     trainers: the run is finished
                              -> Restart  after a growing delay, while the unit's budget lasts
                              -> GiveUp   the run fails with the last lines of the log
```
Written here, since no process manager for Python (honcho, circus and supervisor were looked at) has
roles that restart together, a restart budget, and a judgement of exit statuses.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pipelinerl_cli.up.process import LOG_PREFIX, LocalProcess
from pipelinerl_common.text import counted
from pipelinerl_control.plan import ENDING_ROLES, PlannedProcess, RestartScope, Role

log = logging.getLogger(__name__)

EXIT_DONE, EXIT_SETTINGS = 0, 2
PEER_GRACE_S = 5.0
"""A rank whose peer crashed hangs in a collective: it gets this long to end before it is killed."""
LAST_LINES = 15


@dataclass(frozen=True, slots=True)
class Restart:
    """The process must be started again."""

    reason: str


@dataclass(frozen=True, slots=True)
class Done:
    """The process has finished its work."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """A restarted process would end the same way."""

    reason: str


def judge(
    role: Role, status: int, *, run_is_finished: Callable[[], bool]
) -> Restart | Done | GiveUp:
    """What to do about a process that ended with `status`, negative for a signal. Trainers and the
    evaluator may end by themselves when their work is done.
    """
    if status == EXIT_SETTINGS:
        return GiveUp("wrong job or task")
    if status < 0:
        return Restart(f"was killed by signal {-status}")
    if status != EXIT_DONE:
        return Restart(f"crashed with status {status}")
    if role not in ENDING_ROLES:
        return Restart("ended by itself")
    return Done() if run_is_finished() else Restart("ended before the last step")


@dataclass
class RestartBudget:
    """Allows `most` restarts within `window_s`; the delay before each doubles with the number of
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


@dataclass(frozen=True, slots=True)
class ProcessFailure:
    """Why the run cannot continue."""

    name: str
    reason: str
    last_lines: Sequence[str] = ()
    bad_input: bool = False
    """The user's input is wrong."""

    @property
    def cause(self) -> str:
        """In one line: the last error of the log says more than its last line."""
        lines = [line for line in self.last_lines if " ERROR " in line] or self.last_lines
        last = [LOG_PREFIX.sub("", line) for line in lines[-1:]]
        return ": ".join([f"{self.name} {self.reason}", *last])

    def __str__(self) -> str:
        lines = (f"    {line}" for line in self.last_lines)
        return "\n".join([f"{self.name} {self.reason}", *lines])


@dataclass
class _Unit:
    """Processes that are started and restarted together."""

    name: str
    role: Role
    planned: Sequence[PlannedProcess]
    budget: RestartBudget
    is_retired: bool = False
    """Its process is to end and not to be restarted."""


class Supervisor:
    """Runs the processes of one run.

    `launch` starts one, `run_is_finished` says whether trainers that ended had reached the last
    step, `on_restart` receives the name of every process that is restarted, or the role where all
    of it is.
    """

    def __init__(
        self,
        planned: Iterable[PlannedProcess],
        launch: Callable[[PlannedProcess], Awaitable[LocalProcess]],
        run_is_finished: Callable[[], bool],
        on_restart: Callable[[str], None],
        budget: Callable[[], RestartBudget] = RestartBudget,
    ) -> None:
        self._first = tuple(planned)
        self._launch = launch
        self._run_is_finished = run_is_finished
        self._on_restart = on_restart
        self._budget = budget
        self._kept: dict[asyncio.Task[ProcessFailure | None], _Unit] = {}
        self._ended: asyncio.Queue[asyncio.Task[ProcessFailure | None]] = asyncio.Queue()
        self._running: dict[str, LocalProcess] = {}
        self._stopping = False

    @property
    def running(self) -> dict[str, LocalProcess]:
        return {name: each for name, each in self._running.items() if each.exit_status is None}

    def _is_over(self, unit: _Unit) -> bool:
        return self._stopping or unit.is_retired

    async def run(self) -> ProcessFailure | None:
        """Starts everything and keeps it running. Returns None when the trainers have finished the
        run or `stop` was called, a failure when a process cannot be kept running.
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

    def add(self, planned: Iterable[PlannedProcess]) -> None:
        """Starts these processes too and keeps them running; does nothing once the run is being
        stopped.
        """
        if self._stopping:
            return
        for unit in _units(planned, self._budget):
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
        # Before the signal: its end must not look like a crash to the task that keeps it.
        self._kept[kept].is_retired = True
        if (process := self.running.get(name)) is not None:
            status = await process.stop(grace_s)
            log.info("%s was retired and ended with status %d", name, status)
        # Until its keeper has ended, that could still be about to start the process again.
        await asyncio.wait({kept})

    async def stop(self, grace_s: dict[Role, float]) -> None:
        """SIGTERM role by role in the order given, each with its grace; nothing is restarted from
        here on.
        """
        self._stopping = True
        for role, grace in grace_s.items():
            running = self.running.items()
            processes = [each for name, each in running if Role(name.partition("-")[0]) is role]
            await asyncio.gather(*(process.stop(grace) for process in processes))

    def end(self, name: str) -> None:
        """Ends one process, which is then restarted like a crashed one."""
        if name in self.running:
            self._running[name].kill()

    def kill(self) -> None:
        """Ends everything at once."""
        self._stopping = True
        for process in self.running.values():
            process.kill()

    async def _keep(self, unit: _Unit) -> ProcessFailure | None:
        """Restarts the unit until it is over, done, or cannot be kept running."""
        while not self._is_over(unit):
            processes = [await self._start(each, unit) for each in unit.planned]
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
        lines = culprit.last_lines(LAST_LINES)
        if isinstance(verdict, GiveUp):
            reason = f"cannot run: {verdict.reason}"
            return ProcessFailure(culprit.name, reason, lines, bad_input=True)
        delay = unit.budget.spend(asyncio.get_running_loop().time())
        if delay is None:
            reason = (
                f"{verdict.reason}, restarted {counted(unit.budget.most, 'time')} within "
                f"{unit.budget.window_s:g} s"
            )
            return ProcessFailure(culprit.name, reason, lines)
        self._on_restart(unit.name)
        log.warning(
            "%s %s; %s starts again in %g s", culprit.name, verdict.reason, unit.name, delay
        )
        await asyncio.sleep(delay)
        return None

    async def _start(self, planned: PlannedProcess, unit: _Unit) -> LocalProcess:
        process = await self._launch(planned)
        self._running[planned.name] = process
        # `stop` and `retire` end what runs: they could not see a process that was just starting.
        if self._is_over(unit):
            process.terminate()
        return process


def _units(
    planned: Iterable[PlannedProcess], budget: Callable[[], RestartBudget]
) -> Iterable[_Unit]:
    """One per process, or one per role where the role restarts together."""
    groups: dict[str, list[PlannedProcess]] = {}
    for each in planned:
        together = each.restart_scope is RestartScope.ROLE
        groups.setdefault(f"{each.role.value}s" if together else each.name, []).append(each)
    for name, members in groups.items():
        own_name = members[0].name if len(members) == 1 else name
        yield _Unit(own_name, members[0].role, members, budget())


async def _first_failure_or_all(processes: Sequence[LocalProcess]) -> tuple[LocalProcess, int]:
    """The first process to fail, once its peers were ended too, or the first one when all ended
    with 0.
    """
    waits = {asyncio.create_task(process.wait()): process for process in processes}
    pending = set(waits)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            failed = next((task for task in done if task.result() != 0), None)
            if failed is not None:
                culprit = waits[failed]
                peers = (process for process in processes if process is not culprit)
                await asyncio.gather(*(process.stop(PEER_GRACE_S) for process in peers))
                return culprit, failed.result()
        return processes[0], 0
    finally:
        for task in pending:
            task.cancel()
