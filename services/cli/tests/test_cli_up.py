"""`pipelinerl up` as a process, with fake services: start to end, resume, locks,
signals, crashes.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

HARNESS = Path(__file__).with_name("cli_harness.py")
DEADLINE_S = 60
JOB = """
apiVersion: pipelinerl.dev/v1alpha1
kind: PipelineRLJob
metadata: {name: sums}
spec:
  model: {uri: "tiny://arithmetic"}
  task: {path: "pipelinerl_actor.tasks.arithmetic:Arithmetic"}
  algorithm: {steps: 6}
  actors: {generator: {engine: transformers}}
  weightTransfer: {backend: gloo}
"""


class Up:
    """One `pipelinerl up`; its output is collected in a file."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.output = folder / "run"
        self.out = folder / "out.txt"
        (folder / "job.yaml").write_text(JOB)
        with self.out.open("w") as out:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    HARNESS,
                    "up",
                    folder / "job.yaml",
                    "--output",
                    self.output,
                    *arguments,
                ],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(
                        [str(HARNESS.parent), os.environ.get("PYTHONPATH", "")]
                    ),
                },
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)

    @property
    def text(self) -> str:
        return self.out.read_text()

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.output / "summary.json").read_text())
        return summary

    def until(self, what: str, holds: Callable[[], Any]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            if time.monotonic() > deadline or self.process.poll() is not None:
                pytest.fail(f"never came true: {what}; output:\n{self.text}")
            time.sleep(0.02)

    def until_step(self, step: int) -> None:
        self.until(f"step {step}", lambda: re.search(rf"^step {step}/", self.text, re.MULTILINE))

    def until_started_again(self, name: str) -> None:
        log = self.output / "logs" / f"{name}.log"
        self.until(f"{name} restarted", lambda: log.read_text().count("starts") == 2)

    def starts(self, name: str) -> list[str]:
        """When a process was started, over all sessions."""
        log = self.output / "logs" / f"{name}.log"
        return (
            re.findall(r"^--- (\S+) \S+ starts$", log.read_text(), re.MULTILINE)
            if log.exists()
            else []
        )

    def order(self, name: str, what: str) -> None:
        (self.output / "do").mkdir(exist_ok=True)
        order = self.output / "do" / name
        order.with_name("order.tmp").write_text(what)
        order.with_name("order.tmp").rename(order)

    def services(self) -> list[int]:
        """Processes that belong to this run and are alive."""
        pids = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if str(self.output) in command and int(entry.name) != self.process.pid:
                pids.append(int(entry.name))
        return pids


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def begin(*arguments: str, folder: Path = tmp_path) -> Up:
        folder.mkdir(exist_ok=True)
        up = Up(folder, *arguments)
        started.append(up)
        return up

    yield begin
    for up in started:
        if up.process.poll() is None:
            up.process.kill()
            up.process.wait()


def test_run_goes_from_start_to_end_and_leaves_its_results(start: Callable[..., Up]) -> None:
    up = start()
    assert up.wait() == 0, up.text
    assert re.search(
        r"^step 6/6  reward 0\.060  lag 1\.00 \(max 2\)  ESS 0\.900", up.text, re.MULTILINE
    )
    summary = up.summary()
    assert (summary["status"], summary["steps"], summary["weight_updates"]) == ("finished", 6, 6)
    assert summary["reward_first"] == pytest.approx(0.02)
    assert summary["reward_last"] == pytest.approx(0.05)
    assert "<svg" in (up.output / "report.html").read_text()
    assert (up.output / "token").stat().st_mode & 0o777 == 0o600
    assert {path.name for path in (up.output / "logs").iterdir()} >= {
        "trainer-0.log",
        "actor-0.log",
        "up.log",
        "prepare.log",
    }
    assert up.services() == []


def test_results_that_cannot_be_written_are_said_with_the_remedy(start: Callable[..., Up]) -> None:
    up = start()
    up.until("its folder", (up.output / "logs").is_dir)
    (up.output / "report.html").mkdir()
    assert up.wait() == 1
    assert (
        "the run has finished\nsummary and report cannot be written: [Errno 21] Is a directory"
        in up.text
    )
    assert up.text.endswith(f"pipelinerl report {up.output}\n")


def test_finished_run_says_so_and_goes_on_with_more_steps(start: Callable[..., Up]) -> None:
    assert start().wait() == 0
    again = start()
    assert again.wait() == 0
    assert "this run is finished (6 of 6 steps)" in again.text
    more = start("--max-steps", "9")
    assert more.wait() == 0
    assert "resuming the run" in more.text
    assert "after step 6 of 9" in more.text
    assert "step 1/9" not in more.text
    assert more.summary()["steps"] == 9
    fewer = start("--max-steps", "7")
    assert fewer.wait() == 0
    assert "this run is finished (9 of at least 7 steps)" in fewer.text
    assert more.summary()["samples_trained"] == 36


def test_fresh_moves_the_old_run_aside(start: Callable[..., Up], tmp_path: Path) -> None:
    assert start("--max-steps", "2").wait() == 0
    fresh = start("--fresh", "--max-steps", "3")
    assert fresh.wait() == 0
    assert fresh.summary()["samples_trained"] == 12
    (old,) = (path for path in tmp_path.iterdir() if path.name.startswith("run."))
    assert str(old) in fresh.text
    assert json.loads((old / "summary.json").read_text())["steps"] == 2


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_stops_in_order_and_the_next_up_goes_on(
    start: Callable[..., Up], sent: signal.Signals, status: int
) -> None:
    up = start("--max-steps", "100000")
    up.until_step(3)
    up.process.send_signal(sent)
    assert up.wait() == status, up.text
    assert up.services() == []
    summary = up.summary()
    assert summary["status"] == "interrupted"
    assert summary["steps"] >= 3
    assert "the same command resumes the run" in up.text
    resumed = start("--max-steps", str(summary["steps"] + 3))
    assert resumed.wait() == 0
    assert f"after step {summary['steps']} of" in resumed.text


def test_signal_during_preparation_stops_at_once(start: Callable[..., Up]) -> None:
    up = start()
    up.until("preparation", lambda: "preparing the model" in up.text)
    up.process.send_signal(signal.SIGINT)
    assert up.wait() == 130
    assert up.services() == []
    assert up.summary()["steps"] == 0


def test_crashed_processes_are_restarted_and_counted(start: Callable[..., Up]) -> None:
    up = start("--max-steps", "100000")
    up.until_step(2)
    for name in ("actor-0", "preprocessor-0", "generator-0-0", "trainer-0"):
        up.order(name, "crash")
        up.until_started_again(name)
    up.until("the report of the last restart", lambda: "trainer-0 starts again" in up.text)
    up.process.send_signal(signal.SIGINT)
    up.wait()
    assert up.summary()["restarts_by_process"] == {
        "actor-0": 1,
        "generator-0-0": 1,
        "preprocessor-0": 1,
        "trainer-0": 1,
    }
    assert "trainer-0 crashed with status 1" in up.text


def test_killed_stream_server_comes_back_with_the_run_going_on(start: Callable[..., Up]) -> None:
    up = start("--max-steps", "100000")
    up.until_step(2)
    (ports,) = (up.output / "nats").glob("nats-server_*.ports")
    os.kill(int(re.sub(r"\D", "", ports.name)), signal.SIGKILL)
    up.until("the restart", lambda: "nats ended with status -9" in up.text)
    seen = len(re.findall(r"^step ", up.text, re.MULTILINE))
    up.until("more steps", lambda: len(re.findall(r"^step ", up.text, re.MULTILINE)) > seen + 5)
    up.process.send_signal(signal.SIGINT)
    assert up.wait() == 130
    assert up.summary()["restarts_by_process"] == {"nats": 1}


def test_service_with_wrong_settings_ends_the_run_with_its_message(
    start: Callable[..., Up],
) -> None:
    up = start("--max-steps", "100000")
    up.until_step(2)
    up.order("preprocessor-0", "settings")
    assert up.wait() == 2
    assert "the run failed: preprocessor-0 cannot run: wrong job or task" in up.text
    assert "ordered to settings" in up.text
    assert up.summary()["status"] == "failed"
    assert (
        up.summary()["failure"]
        == "preprocessor-0 cannot run: wrong job or task: ordered to settings"
    )
    assert up.services() == []


def test_failed_preparation_ends_the_run_with_its_message(
    start: Callable[..., Up], tmp_path: Path
) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    up = start()
    up.until("the folder", lambda: (up.output / "job.yaml").exists())
    up.order("prepare", "crash")
    assert up.wait() == 1
    assert "prepare ended with status 1" in up.text


def test_preparation_that_finds_the_input_wrong_leaves_nothing_behind(
    start: Callable[..., Up], tmp_path: Path
) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    up = start()
    up.until("the folder", lambda: (up.output / "job.yaml").exists())
    up.order("prepare", "settings")
    assert up.wait() == 2
    assert (
        f"nothing was started, and no {up.output} is left: prepare ended with status 2" in up.text
    )
    assert "ordered to settings" in up.text
    assert not up.output.exists()


def test_trainer_that_stops_early_is_started_again_until_the_last_step(
    start: Callable[..., Up],
) -> None:
    up = start("--max-steps", "40")
    up.until_step(2)
    up.order("trainer-0", "stop")
    assert up.wait() == 0, up.text
    assert "ended before the last step" in up.text
    assert up.summary()["steps"] == 40
    assert up.summary()["restarts"] == 1


def test_no_service_outlives_a_killed_up_and_the_next_one_goes_on(start: Callable[..., Up]) -> None:
    up = start("--max-steps", "100000")
    up.until_step(3)
    assert len(up.services()) >= 6  # four services, the generator's own worker, the stream's server
    up.process.kill()
    up.wait()
    deadline = time.monotonic() + DEADLINE_S
    while up.services():
        assert time.monotonic() < deadline, "services outlived `up`"
        time.sleep(0.02)
    resumed = start("--max-steps", "5")
    assert resumed.wait() == 0, resumed.text
    assert resumed.summary()["steps"] == 5


def test_second_up_on_the_same_folder_is_refused_and_one_on_another_works(
    start: Callable[..., Up], tmp_path: Path
) -> None:
    first = start("--max-steps", "100000")
    first.until_step(1)
    other = start(folder=tmp_path / "other")
    assert other.wait() == 0, other.text
    second_output = tmp_path / "second.txt"
    with second_output.open("w") as out:
        command = [
            sys.executable,
            *map(
                str,
                (
                    HARNESS,
                    "up",
                    tmp_path / "job.yaml",
                    "--output",
                    first.output,
                ),
            ),
        ]
        assert subprocess.run(command, stderr=out, timeout=DEADLINE_S, check=False).returncode == 2
    assert (
        f"another `pipelinerl up` (process {first.process.pid}) is running in it"
        in second_output.read_text()
    )
    assert first.process.poll() is None


HYBRID = (
    *("--set", "actors={replicas: 1, maxReplicas: 2, generator: {engine: transformers}}"),
    *("--set", "autoscale={enabled: true, schedule: hybrid, exploreSteps: 10, periodSteps: 10}"),
)


def test_actor_goes_and_comes_again_while_nothing_else_is_touched(start: Callable[..., Up]) -> None:
    up = start("--max-steps", "100000", *HYBRID)
    up.until(
        "the one that goes",
        lambda: "actors 2 -> 1: the 10 steps in which every actor generates are over" in up.text,
    )
    up.until(
        "the one that comes",
        lambda: "actors 1 -> 2: trainers wait for samples (ratio 1.000" in up.text,
    )
    up.until(
        "its start", lambda: len(up.starts("actor-1")) == 2 and len(up.starts("generator-1-0")) == 2
    )
    up.until("that it is ready", lambda: "actors 2 of 2" in up.text.rpartition("actors 1 -> 2")[2])
    targets = json.loads((up.output / "metrics-targets.json").read_text())
    assert "actor-1" in {target["labels"]["instance"] for target in targets}
    up.process.send_signal(signal.SIGINT)
    assert up.wait() == 130, up.text
    assert up.services() == []
    assert up.summary()["restarts"] == 0
    assert [
        len(up.starts(name)) for name in ("trainer-0", "actor-0", "generator-0-0", "preprocessor-0")
    ] == [1, 1, 1, 1]
    assert "actors 1 of 2" in up.text
    assert "<figcaption>Actors" in (up.output / "report.html").read_text()


def test_interrupted_in_the_middle_of_a_change_the_next_session_goes_on_with_the_choice(
    start: Callable[..., Up],
) -> None:
    up = start("--max-steps", "100000", *HYBRID)
    up.until("the one that goes", lambda: "actors 2 -> 1" in up.text)
    up.process.send_signal(signal.SIGINT)
    assert up.wait() == 130, up.text
    assert up.services() == []
    chosen = json.loads((up.output / "autoscale.json").read_text())
    assert (chosen["actors"], chosen["start"]) == (1, 1)
    steps = up.summary()["steps"]
    again = start("--max-steps", str(steps + 5), *HYBRID)
    assert again.wait() == 0, again.text
    assert len(again.starts("actor-1")) == 1, "only in the first session"


def test_choice_that_cannot_be_read_is_said_with_the_remedy(
    start: Callable[..., Up], tmp_path: Path
) -> None:
    up = start("--max-steps", "2", *HYBRID)
    assert up.wait() == 0
    (tmp_path / "run" / "autoscale.json").write_text("{")
    again = start("--max-steps", "4", *HYBRID)
    assert again.wait() == 2
    assert "autoscale.json: cannot be read" in again.text
    off = start("--max-steps", "4")
    assert off.wait() == 0, off.text
    assert not (tmp_path / "run" / "autoscale.json").exists()


EVALUATED = (
    "--set",
    "trainers.checkpoint.everySteps=2",
    "--set",
    "evaluation={everySteps: 2, sets: [{name: held-out, path: 'tasks:Sums'}]}",
)


def test_the_last_evaluation_is_waited_for_and_nothing_else_runs_meanwhile(
    start: Callable[..., Up],
) -> None:
    up = start(*EVALUATED)
    up.until(
        "the wait", lambda: "training is finished; evaluating step 6, 1:00:03 at most" in up.text
    )
    up.until(
        "the end of training's processes", lambda: len(up.services()) == 2
    )  # the evaluator and the stream's server
    (up.output / "evaluate").touch()
    assert up.wait() == 0, up.text
    assert "step 6 evaluated: held-out pass@1 0.750 (0.500 to 1.000)" in up.text
    assert "held-out: pass@1 0.750 (0.500 to 1.000) at step 6" in up.text.splitlines()
    assert up.summary()["evaluation"]["held-out"]["step"] == 6
    assert up.services() == []
    again = start(*EVALUATED)
    assert again.wait() == 0
    assert "this run is finished (6 of 6 steps)" in again.text


def test_a_last_evaluation_that_was_not_waited_for_is_done_by_the_next_up(
    start: Callable[..., Up],
) -> None:
    up = start(*EVALUATED)
    up.until("the wait", lambda: "training is finished" in up.text)
    up.process.send_signal(signal.SIGINT)
    assert up.wait() == 0, up.text
    assert "step 6 is not evaluated; the same command does it" in up.text
    assert up.summary()["status"] == "finished"
    assert up.services() == []
    (up.output / "evaluate").touch()
    again = start(*EVALUATED)
    assert again.wait() == 0, again.text
    assert "step 6 evaluated" in again.text
    assert again.summary()["steps"] == 6


def test_an_evaluator_that_cannot_run_does_not_fail_the_run(start: Callable[..., Up]) -> None:
    up = start("--max-steps", "40", *EVALUATED)
    up.until_step(2)
    up.order("evaluator-0", "settings")
    assert up.wait() == 0, up.text
    assert (
        "evaluation has ended, the run continues: evaluator-0 cannot run: wrong job or task"
        in up.text
    )
    assert (up.summary()["status"], up.summary()["steps"]) == ("finished", 40)


def test_an_evaluator_that_takes_too_long_is_left_behind(start: Callable[..., Up]) -> None:
    hurried = EVALUATED[3].replace("everySteps: 2,", "everySteps: 2, timeoutSeconds: 0.01,")
    up = start(*EVALUATED[:2], "--set", hurried)
    assert up.wait() == 0, up.text
    assert "step 6 is not evaluated after 3.02 s; see logs/evaluator-0.log" in up.text
    assert up.summary()["status"] == "finished"
    assert up.services() == []
