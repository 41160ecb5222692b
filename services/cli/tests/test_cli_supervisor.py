"""The supervisor with real processes: small Python programs that follow a script."""

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pipelinerl_cli.up.process import LocalProcess
from pipelinerl_cli.up.supervisor import ProcessFailure, RestartBudget, Supervisor
from pipelinerl_control.plan import PlannedProcess, Role

DEADLINE_S = 30
NOTE_THE_END = """
import sys, signal, time
def end(*_):
    with open(sys.argv[1] + "/order", "a") as order:
        order.write("{}\\n")
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
time.sleep(600)
"""
STAY = "import time; print('up', flush=True); time.sleep(600)"
"""Ends at SIGTERM by default action."""


def workload(name: str) -> PlannedProcess:
    return PlannedProcess(
        name, Role(name.partition("-")[0]), int(name.rpartition("-")[2]), (), "127.0.0.1:1"
    )


class Stage:
    """Programs by process name; a list is one program per start, the last one repeated."""

    def __init__(self, folder: Path, programs: dict[str, str | list[str]]) -> None:
        self.folder = folder
        self.programs = programs
        self.later: tuple[str, ...] = ()
        """Not started with the others."""
        self.starts: Counter[str] = Counter()
        self.started: list[str] = []
        self.restarted: list[str] = []
        self.finished = False
        self.changed = asyncio.Event()
        self.processes: dict[str, LocalProcess] = {}

    async def launch(self, workload: PlannedProcess) -> LocalProcess:
        programs = self.programs[workload.name]
        choices = [programs] if isinstance(programs, str) else programs
        program = choices[min(self.starts[workload.name], len(choices) - 1)]
        process = await LocalProcess.start(
            workload.name,
            ("python", "-c", program, str(self.folder)),
            log_file=self.folder / f"{workload.name}.log",
            environment=dict(os.environ),
        )
        self.starts[workload.name] += 1
        self.started.append(workload.name)
        self.processes[workload.name] = process
        self.changed.set()
        return process

    def supervisor(self) -> Supervisor:
        return Supervisor(
            [workload(name) for name in self.programs if name not in self.later],
            self.launch,
            lambda: self.finished,
            on_restart=self.restarted.append,
            budget=lambda: RestartBudget(most=2, first_delay_s=0.01),
        )

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                self.changed.clear()
                await self.changed.wait()

    async def until_up(self, *names: str) -> None:
        """The programs themselves run, so that they can take a signal."""
        await self.until(lambda: set(names) <= set(self.processes))
        await soon(lambda: all("up" in self.processes[name].last_lines(5) for name in names))


@asynccontextmanager
async def running(
    stage: Stage,
) -> AsyncIterator[tuple[Supervisor, "asyncio.Task[ProcessFailure | None]"]]:
    supervisor = stage.supervisor()
    task = asyncio.create_task(supervisor.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield supervisor, task
    finally:
        supervisor.kill()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.gather(*(process.wait() for process in stage.processes.values()))


def is_alive(pid: int) -> bool:
    """Neither gone nor only waiting for its parent to notice that it is."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


async def soon(holds: Callable[[], bool]) -> None:
    """Waits for what other processes do, which no event reports."""
    async with asyncio.timeout(DEADLINE_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_run_is_over_when_the_trainer_has_finished(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"generator-0-0": STAY, "trainer-0": "pass"})
    stage.finished = True
    async with running(stage) as (_, task):
        assert await task is None
        assert stage.restarted == []


async def test_trainer_that_ends_before_the_last_step_is_started_again(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"trainer-0": ["pass", STAY]})
    async with running(stage) as (_, task):
        await stage.until(lambda: stage.starts["trainer-0"] == 2)
        assert stage.restarted == ["trainer-0"]
        assert not task.done()


@pytest.mark.parametrize("name", ["preprocessor-0", "generator-0-0", "reference-0", "actor-0"])
async def test_killed_process_is_restarted_alone(tmp_path: Path, name: str) -> None:
    stage = Stage(tmp_path, {name: STAY, "trainer-0": STAY})
    async with running(stage):
        await stage.until_up(name, "trainer-0")
        trainer = stage.processes["trainer-0"].pid
        os.kill(stage.processes[name].pid, signal.SIGKILL)
        await stage.until(lambda: stage.starts[name] == 2)
        assert stage.restarted == [name]
        assert stage.processes["trainer-0"].pid == trainer
        assert stage.processes["trainer-0"].exit_status is None


async def test_process_that_hangs_is_ended_and_started_again(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"generator-0-0": STAY, "trainer-0": STAY})
    async with running(stage) as (supervisor, _):
        await stage.until_up("generator-0-0", "trainer-0")
        os.kill(stage.processes["generator-0-0"].pid, signal.SIGSTOP)
        supervisor.end("generator-0-0")
        await stage.until(lambda: stage.starts["generator-0-0"] == 2)
        assert stage.restarted == ["generator-0-0"]


def test_the_cause_of_a_failure_is_the_last_error_of_its_log() -> None:
    lines = [
        "2026-11-29T20:00:00.123Z INFO actor-0 begins",
        "2026-11-29T20:00:01.123Z ERROR actor-0 crashed error=SettingsError: model.maxModelLen=64 "
        "is too small",
        "2026-11-29T20:00:02.123Z INFO actor-0 ends",
    ]
    failure = ProcessFailure("actor-0", "cannot run: wrong job or task", lines)
    assert failure.cause == (
        "actor-0 cannot run: wrong job or task: crashed error=SettingsError: "
        "model.maxModelLen=64 is too small"
    )
    assert (
        ProcessFailure("nats", "ended with status 1", ["no room"]).cause
        == "nats ended with status 1: no room"
    )
    assert ProcessFailure("nats", "ended with status 1").cause == "nats ended with status 1"


async def test_crashed_rank_takes_every_rank_with_it(tmp_path: Path) -> None:
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', "
        "flush=True); time.sleep(600)"
    )
    stage = Stage(tmp_path, {"trainer-0": [deaf, STAY], "trainer-1": STAY, "actor-0": STAY})
    async with running(stage):
        await stage.until_up("trainer-0", "trainer-1", "actor-0")
        first = stage.processes["trainer-0"]
        os.kill(stage.processes["trainer-1"].pid, signal.SIGKILL)
        await stage.until(lambda: stage.starts["trainer-0"] == 2 and stage.starts["trainer-1"] == 2)
        assert (
            first.exit_status == -signal.SIGKILL
        )  # a rank that hangs in a collective does not listen
        assert stage.restarted == ["trainers"]
        assert stage.starts["actor-0"] == 1


async def test_crashes_without_end_fail_the_run_with_the_last_lines(tmp_path: Path) -> None:
    stage = Stage(
        tmp_path,
        {"actor-0": "print('one'); print('the reason'); raise SystemExit(1)", "trainer-0": STAY},
    )
    async with running(stage) as (_, task):
        failure = await task
    assert failure is not None
    assert failure.name == "actor-0"
    assert stage.starts["actor-0"] == 3
    assert stage.restarted == ["actor-0", "actor-0"]
    assert list(failure.last_lines) == ["one", "the reason"]
    assert "crashed with status 1, restarted 2 times" in str(failure)
    assert not failure.bad_input


async def test_wrong_settings_fail_the_run_at_once(tmp_path: Path) -> None:
    stage = Stage(
        tmp_path,
        {"trainer-0": "print('zeroStage=9 is wrong'); raise SystemExit(2)", "actor-0": STAY},
    )
    async with running(stage) as (_, task):
        failure = await task
    assert failure is not None
    assert failure.bad_input
    assert stage.starts["trainer-0"] == 1
    assert "zeroStage=9 is wrong" in str(failure)


async def test_stop_goes_role_by_role_and_kills_what_does_not_listen(tmp_path: Path) -> None:
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', "
        "flush=True); time.sleep(600)"
    )
    stage = Stage(
        tmp_path,
        {
            "actor-0": NOTE_THE_END.format("actor"),
            "generator-0-0": deaf,
            "trainer-0": NOTE_THE_END.format("trainer"),
        },
    )
    async with running(stage) as (supervisor, task):
        await stage.until_up(*stage.programs)
        await supervisor.stop({Role.TRAINER: 20, Role.ACTOR: 20, Role.GENERATOR: 0.2})
        assert await task is None
        assert (tmp_path / "order").read_text().split() == ["trainer", "actor"]
        assert stage.processes["generator-0-0"].exit_status == -signal.SIGKILL
        assert stage.restarted == []
        assert supervisor.running == {}


async def test_process_that_is_added_is_kept_running_like_the_others(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"trainer-0": STAY, "actor-1": STAY})
    stage.later = ("actor-1",)
    async with running(stage) as (supervisor, _):
        await stage.until_up("trainer-0")
        assert set(supervisor.running) == {"trainer-0"}
        supervisor.add([workload("actor-1")])
        await stage.until_up("actor-1")
        os.kill(stage.processes["actor-1"].pid, signal.SIGKILL)
        await stage.until(lambda: stage.starts["actor-1"] == 2)
        assert stage.restarted == ["actor-1"]


async def test_process_that_is_retired_ends_for_good_and_the_others_go_on(tmp_path: Path) -> None:
    crash_at_the_end = NOTE_THE_END.format("actor").replace("sys.exit()", "sys.exit(1)")
    stage = Stage(tmp_path, {"trainer-0": STAY, "actor-1": crash_at_the_end, "generator-1-0": STAY})
    async with running(stage) as (supervisor, task):
        await stage.until_up(*stage.programs)
        await supervisor.retire("actor-1", 20)
        assert (tmp_path / "order").read_text().split() == ["actor"]
        assert set(supervisor.running) == {"trainer-0", "generator-1-0"}
        assert stage.restarted == []
        assert not task.done()
        supervisor.add([workload("actor-1")])  # it may come back
        await stage.until(lambda: stage.starts["actor-1"] == 2)
        await supervisor.retire("actor-7", 20)  # was never there


async def test_process_that_does_not_listen_is_killed_when_it_is_retired(tmp_path: Path) -> None:
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', "
        "flush=True); time.sleep(600)"
    )
    stage = Stage(tmp_path, {"trainer-0": STAY, "actor-1": deaf})
    async with running(stage) as (supervisor, _):
        await stage.until_up(*stage.programs)
        await supervisor.retire("actor-1", 0.2)
        assert stage.processes["actor-1"].exit_status == -signal.SIGKILL
        assert stage.restarted == []


async def test_stop_while_a_process_drains_does_not_cut_it_short(tmp_path: Path) -> None:
    drain = (
        "import signal, sys, time\n"
        "def end(*_):\n    print('asked', flush=True)\n    time.sleep(0.3)\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end); print('up', flush=True); time.sleep(600)"
    )
    stage = Stage(tmp_path, {"trainer-0": STAY, "actor-1": drain})
    async with running(stage) as (supervisor, task):
        await stage.until_up(*stage.programs)
        retiring = asyncio.create_task(supervisor.retire("actor-1", 20))
        await soon(lambda: "asked" in stage.processes["actor-1"].last_lines(5))
        retiring.cancel()
        await supervisor.stop({Role.TRAINER: 20, Role.ACTOR: 20})
        assert await task is None
        assert stage.processes["actor-1"].last_lines(5).count("asked") == 1
        assert stage.processes["actor-1"].exit_status == 0
        supervisor.add([workload("actor-1")])  # nothing is started any more
        assert stage.starts["actor-1"] == 1


async def test_kill_ends_everything_at_once(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"actor-0": STAY, "trainer-0": STAY})
    async with running(stage) as (supervisor, task):
        await stage.until_up("actor-0", "trainer-0")
        supervisor.kill()
        assert await task is None
        await asyncio.gather(*(process.wait() for process in stage.processes.values()))


async def test_children_of_a_crashed_process_end_with_it(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\nraise SystemExit(1)"
    )
    stage = Stage(tmp_path, {"actor-0": [program, STAY], "trainer-0": STAY})
    async with running(stage):
        await stage.until(lambda: stage.starts["actor-0"] == 2)
        child = int((tmp_path / "actor-0.log").read_text().splitlines()[1])
        await soon(lambda: not is_alive(child))


async def test_process_does_not_outlive_the_one_that_started_it_even_when_that_is_killed(
    tmp_path: Path,
) -> None:
    parent_program = f"""
import asyncio, os
from pathlib import Path
from pipelinerl_cli.up.process import LocalProcess
async def main():
    log = Path({str(tmp_path)!r}) / "child.log"
    child = await LocalProcess.start(
        "child", ("python", "-c", {STAY!r}), log_file=log, environment=dict(os.environ)
    )
    while not child.last_lines(1) == ["up"]:
        await asyncio.sleep(0.01)
    print(child.pid, flush=True)
    await child.wait()
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", parent_program, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        child = int(await parent.stdout.readline())
        assert is_alive(child)
        parent.kill()
        await parent.wait()
        await soon(lambda: not is_alive(child))


async def test_command_that_cannot_be_started_says_so_in_its_log(tmp_path: Path) -> None:
    process = await LocalProcess.start(
        "x", ("/no/such/program",), log_file=tmp_path / "x.log", environment=dict(os.environ)
    )
    assert await process.wait() == 127
    assert process.last_lines(1) == [
        "/no/such/program: cannot be started: No such file or directory"
    ]
