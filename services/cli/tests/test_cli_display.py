import io
import logging
import math
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipelinerl_cli.up.display import (
    LiveDisplay,
    PlainDisplay,
    duration,
    number,
    rows,
    sparkline,
    step_line,
)
from pipelinerl_cli.up.live_metrics import GENERATING, RunView
from pipelinerl_cli.up.placement import (
    Ports,
    assign_gpus,
    check_port_is_free,
    environment,
    missing_gpus,
    threads_per_process,
)
from pipelinerl_cli.up.session import keep_log
from pipelinerl_cli.up.status_lines import Silence, StallExplainer
from pipelinerl_cli.up.supervisor import Done, GiveUp, Restart, RestartBudget, judge
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.runs.history import RunHistory
from pipelinerl_common.runs.records import SILENCE_RECORD, Record, silences
from pipelinerl_common.runs.summary import summarize
from pipelinerl_common.settings import Job, parse_job
from pipelinerl_control.plan import Role


def make_job(**spec: Any) -> Job:
    document = {
        "apiVersion": "pipelinerl.dev/v1alpha1",
        "kind": "PipelineRLJob",
        "metadata": {"name": "sums"},
        "spec": {"model": {"uri": "tiny://arithmetic"}, "task": {"path": "tasks:Sums"}, **spec},
    }
    return parse_job(document, source="test")


def trained(step: int, time: float, reward: float) -> Record:
    values = {
        "reward_mean": reward,
        "lag_mean": 1.25,
        "lag_max": 3.0,
        "ess": 0.97,
        "pause_seconds": 0.04,
    }
    return Record("trainer", "trainer-0", time, step, {**values, "weight_updates_total": 7.0})


def generated(actor: str, time: float, tokens: float) -> Record:
    return Record(
        "actor", actor, time, -1, {"tokens_generated_total": tokens, "requests_running": 8.0}
    )


def view_after_steps() -> RunView:
    view = RunView(steps_total=100)
    view.take(generated("actor-0", 0, 0.0))
    view.take(generated("actor-0", 10, 10_000.0))
    view.take(generated("actor-1", 10, 5_000.0))
    view.take(
        Record(
            "preprocessor",
            "preprocessor-0",
            1,
            -1,
            {"queue_groups{stage=ready}": 12.0, "queue_groups{stage=running}": 20.0},
        )
    )
    for step in (1, 2, 3):
        assert view.take(trained(step, 10.0 * step, step / 10))
    return view


def test_view_adds_instances_and_estimates_the_time_left() -> None:
    view = view_after_steps()
    assert view.gauge("actor", "requests_running") == 16
    assert view.gauge("actor", "nothing") is None
    assert view.total("trainer", "weight_updates_total") == 7
    view.take(
        Record("trainer", "trainer-0", 99, -1, {"weight_updates_total": 2.0})
    )  # a restarted trainer counts from 0
    assert view.total("trainer", "weight_updates_total") == 9
    assert view.seconds_left == 970  # 97 steps at 10 s
    assert view.trend("trainer", "reward_mean") == (0.1, 0.2, 0.3)


def test_actors_that_come_and_go_are_shown() -> None:
    view = RunView(steps_total=100, is_elastic=True)
    view.take(Record("up", "up", 1, -1, {"actors_desired": 2.0, "actors_ready": 1.0}))
    view.take(trained(1, 10.0, 0.1))
    assert "  actors 1 of 2" in step_line(view)
    assert ("actors", "1 of 2 ready", "") in rows(view, 8)
    assert not any(label == "actors" for label, _, _ in rows(view_after_steps(), 8))


def two_sessions() -> list[Record]:
    """Three steps, then a session that resumes after the second, with a restart, other pauses and
    an idle hour between.
    """

    def trained_(step: int, time: float, updates: float, pause: float) -> Record:
        values = {"reward_mean": 0.5, "weight_updates_total": updates, "pause_seconds": pause}
        return Record("trainer", "trainer-0", time, step, values)

    return [
        Record("up", "up", 0, -1, {"session_started": 1.0, "restarts_total": 0.0}),
        generated("actor-0", 10, 0),
        *(trained_(step, 10.0 + step, step, 0.1) for step in (1, 2, 3)),
        generated("actor-0", 20, 3000),
        Record("up", "up", 20, -1, {"restarts_total": 1.0}),
        Record("up", "up", 4000, -1, {"session_started": 1.0, "restarts_total": 0.0}),
        generated("actor-0", 4005, 500),
        *(trained_(step, 4010.0 + step, step - 2, 0.4) for step in (3, 4)),
        generated("actor-0", 4020, 1000),
        Record("up", "up", 4020, -1, {"restarts_total": 2.0}),
    ]


def test_what_is_shown_live_is_what_the_summary_says_over_a_resume_too() -> None:
    view = RunView(steps_total=4)
    for record in two_sessions():
        view.take(record)
    summary = summarize(RunHistory(two_sessions()), status="finished", job="sums", seed=0)
    assert view.total("trainer", "weight_updates_total") == summary["weight_updates"] == 5
    assert view.restarts == summary["restarts"] == 3
    assert (
        view.pause.mean == pytest.approx(summary["pause_seconds_mean"]) == pytest.approx(0.25)
    )  # 0.1, 0.1, 0.4, 0.4
    assert view.generation.tokens == summary["tokens_generated"] == 4000
    assert view.generation.tokens_per_second == pytest.approx(
        4000 / 25
    )  # from 10 to 20 and from 4005 to 4020
    assert summary["tokens_per_second"] == pytest.approx(4000 / 25, rel=1e-5)


def test_a_new_session_has_no_pace_and_no_newest_numbers_of_the_old_one() -> None:
    view = view_after_steps()
    view.take(Record("up", "up", 4000, -1, {"session_started": 1.0}))
    assert not view.is_training
    assert view.seconds_per_step is None
    assert view.gauge("preprocessor", "queue_groups{stage=ready}") is None
    assert view.step == 3


def test_plain_display_writes_one_line_per_step_and_per_phase() -> None:
    out = io.StringIO()
    display = PlainDisplay(out)
    view = RunView(steps_total=100, phase="loading")
    display.update(view)
    display.update(view)
    stepped = view_after_steps()
    display.update(stepped)
    display.stepped(stepped)
    assert out.getvalue().splitlines() == [
        "loading",
        "step 3/100  reward 0.300  lag 1.25 (max 3)  ESS 0.970  500 tokens/s mean  ready 12  "
        "running 20  updates 7",
    ]


def test_a_reader_of_the_progress_that_is_gone_does_not_stop_the_run() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as out:
        display = PlainDisplay(out)
        display.note("no process reads this")
        display.stepped(view_after_steps())
        out.write("nor this, and its end is no error")


def test_a_full_disk_under_the_log_does_not_reach_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with keep_log(Path("/dev/full"), PlainDisplay()):
        logging.getLogger("pipelinerl_control.coordinator").info("formed")
    shown = capsys.readouterr()
    assert shown.out + shown.err == ""


def test_a_long_wait_is_explained_with_what_was_dropped_since_the_last_step() -> None:
    view, stall = RunView(steps_total=9, phase=GENERATING), StallExplainer(groups_per_step=32)

    def count(time: float, dropped: float, failed: float) -> None:
        view.take(
            Record(
                "preprocessor",
                "preprocessor-0",
                time,
                0,
                {"groups_dropped_total{reason=zero_advantage}": dropped},
            )
        )
        view.take(
            Record(
                "actor", "actor-0", time, -1, {"rollout_errors_total{reason=task_error}": failed}
            )
        )

    count(1, dropped=100, failed=0)
    assert stall.look(view, 0) is None
    count(2, dropped=1740, failed=3)
    view.take(
        Record(
            "preprocessor",
            "preprocessor-0",
            2,
            0,
            {"queue_groups{stage=ready}": 5.0, "queue_groups{stage=running}": 2.0},
        )
    )
    assert stall.look(view, 59) is None
    assert stall.look(view, 60) == (
        "no step for 60 s: step 1 needs 32 groups, 5 are ready, 2 run; groups dropped meanwhile: "
        "zero_advantage 1,640; "
        "rollouts failed meanwhile: task_error 3; see logs/actor-0.log"
    )
    assert stall.look(view, 119) is None
    assert stall.look(view, 120) is not None
    view.take(trained(1, 3.0, 0.5))
    assert stall.look(view, 130) is None
    assert "step 2 needs 32 groups" in str(stall.look(view, 190))
    assert "dropped" not in str(stall.look(view, 310))


def test_a_wait_names_who_has_fallen_silent() -> None:
    view, stall = RunView(steps_total=9, phase=GENERATING), StallExplainer(groups_per_step=1)
    view.take(generated("actor-0", 10, 0))
    view.take(Record("preprocessor", "preprocessor-0", 12, -1, {"queue_groups{stage=ready}": 1.0}))
    assert stall.look(view, 0) is None
    view.take(Record("preprocessor", "preprocessor-0", 70, -1, {"queue_groups{stage=ready}": 1.0}))
    assert stall.look(view, 60) == (
        "no step for 60 s: step 1 needs 1 group, 1 is ready, 0 run; actor-0 has reported "
        "nothing for 60 s"
    )


def test_a_generators_silence_is_said_at_once_then_ever_more_seldom_and_ends_with_its_process() -> (
    None
):
    said: list[str] = []
    recorded: list[tuple[str, float]] = []
    ended: list[str] = []
    silence = Silence(said.append, lambda name, value: recorded.append((name, value)), ended.append)
    silence.look({})
    for seconds in (20.0, 30.0, 41.0, 60.0):
        silence.look({"generator-0-0": seconds})
    assert said == [
        "generator-0-0 has not answered for 20 s; after 180 s it is ended and restarted",
        "generator-0-0 has not answered for 41 s; after 180 s it is ended and restarted",
    ]
    silence.look({})
    assert said[2:] == ["generator-0-0 answers again, or has ended"]
    assert recorded == [("silent_generator-0-0_seconds", value) for value in (20.0, 41.0, 0.0)]
    for seconds in (100.0, 179.0, 181.0, 182.0):
        silence.look({"generator-0-0": seconds})
    assert ended == ["generator-0-0"]
    assert said[-1] == "generator-0-0 has not answered for 181 s: it is ended and restarted"
    silence.look({})
    assert recorded[-1] == ("silent_generator-0-0_seconds", 0.0)
    silence.look({"generator-0-0": 200.0})  # of the next process
    assert ended == ["generator-0-0", "generator-0-0"]


@pytest.mark.parametrize("name", ["generator-0-0", "actor-1"])
def test_a_record_of_a_silence_is_read_as_it_was_written(name: str) -> None:
    values = {SILENCE_RECORD.format(name=name): 20.0, "step_seconds": 1.0}
    assert silences(Record("up", "up", 0.0, -1, values)) == {name: 20.0}


def test_waits_of_slow_steps_are_not_explained_early() -> None:
    view, stall = view_after_steps(), StallExplainer(groups_per_step=32)
    for step in (4, 5):
        view.take(trained(step, 100.0 * step, 0.5))
    assert stall.look(view, 0) is None
    pace = view.seconds_per_step
    assert pace is not None
    assert pace > 60
    assert stall.look(view, 3 * pace) is None
    assert stall.look(view, 4 * pace) is not None


def test_live_display_shows_what_is_waited_for_and_then_the_numbers() -> None:
    console = Console(width=100, force_terminal=True, file=io.StringIO())
    display = LiveDisplay("sums", "/runs/sums", console)

    def shown(view: RunView) -> str:
        with console.capture() as capture:
            console.print(display.render(view))
        return capture.get()

    assert "waiting for generator-0-0" in shown(
        RunView(10, phase="loading", detail="waiting for generator-0-0")
    )
    view = view_after_steps()
    view.take(Record("up", "up", 31, -1, {"restarts_total": 2.0}))
    text = shown(view)
    for expected in (
        "step 3/100",
        "0.300",
        "▁▅█",
        "1.25 mean, 3 max",
        "0.970",
        "500 mean",
        "12 ready, 20 running",
        "7, pause 0.040 s mean",
        "16:10 left",
    ):
        assert expected in text


def test_words_for_numbers() -> None:
    assert sparkline([0, 0.5, 1]) == "▁▅█"
    assert sparkline([0.4, 0.4]) == "▁▁"
    assert sparkline([math.nan]) == ""
    assert (
        sparkline([0.9, 1.0, 0.5], 2, low=0.0, high=1.0) == "█▅"
    )  # only the last two, on the scale from 0 to 1
    assert [duration(75), duration(3675)] == ["1:15", "1:01:15"]
    assert [number(None), number(math.nan), number(1.234), number(12345, 0)] == [
        "-",
        "-",
        "1.23",
        "12,345",
    ]


@pytest.mark.parametrize(
    ("role", "status", "finished", "verdict"),
    [
        (Role.TRAINER, 0, True, Done()),
        (Role.TRAINER, 0, False, Restart("ended before the last step")),
        (Role.ACTOR, 0, False, Restart("ended by itself")),
        (Role.GENERATOR, 0, False, Restart("ended by itself")),
        (Role.PREPROCESSOR, 1, False, Restart("crashed with status 1")),
        (Role.ACTOR, -9, False, Restart("was killed by signal 9")),
        (Role.TRAINER, 2, False, GiveUp("wrong job or task")),
    ],
)
def test_what_an_exit_means(
    role: Role, status: int, finished: bool, verdict: Restart | Done | GiveUp
) -> None:
    assert judge(role, status, run_is_finished=lambda: finished) == verdict


def test_restart_budget_waits_longer_each_time_and_is_used_up_within_its_window() -> None:
    budget = RestartBudget(most=3, window_s=100, first_delay_s=0.5)
    assert [budget.spend(now) for now in (0, 10, 20, 30)] == [0.5, 1.0, 2.0, None]
    assert budget.spend(105) == 2.0  # the one at 0 is forgotten


def test_threads_share_the_cores() -> None:
    job = make_job(actors={"replicas": 2}, trainers={"processesPerNode": 2})
    assert [threads_per_process(job, cores) for cores in (2, 8, 64)] == [1, 2, 16]


def test_a_job_may_need_as_many_gpus_as_there_are_and_no_more() -> None:
    job = make_job(
        actors={"gpusPerReplica": 2, "generatorsPerReplica": 2}, trainers={"processesPerNode": 2}
    )
    assert missing_gpus(job, 4) == []
    (fault,) = missing_gpus(job, 3)
    assert fault.startswith(
        "actors.gpusPerReplica=2: the job needs 4 GPUs (generator 2, trainer 2), this machine has 3"
    )
    assert "lower it, or the numbers of replicas" in fault
    assert missing_gpus(make_job(), 0) == []


def test_gpus_go_to_generators_then_trainers_and_a_job_without_gpus_sees_none() -> None:
    job = make_job(
        actors={"gpusPerReplica": 2, "generatorsPerReplica": 2}, trainers={"processesPerNode": 2}
    )
    assert assign_gpus(job, None) == {
        "preprocessor-0": "",
        "generator-0-0": "0",
        "generator-0-1": "1",
        "trainer-0": "2",
        "trainer-1": "3",
        "actor-0": "",
    }
    assert assign_gpus(job, "4,5,6,7")["trainer-1"] == "7"
    assert set(assign_gpus(make_job(), "0,1").values()) == {""}


def test_environment_keeps_the_users_thread_count() -> None:
    assert (
        environment(make_job(), "trainer-0", {"OMP_NUM_THREADS": "3"}, cores=8)["OMP_NUM_THREADS"]
        == "3"
    )
    assert environment(make_job(), "trainer-0", {}, cores=8)["OMP_NUM_THREADS"] == "4"


def test_reserved_port_can_be_listened_on_by_its_process_and_is_given_to_nobody_else() -> None:
    with Ports() as ports:
        port = ports.reserve()
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port))
            server.listen()
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        assert len({ports.reserve() for _ in range(50)} | {port}) == 51


def test_port_of_a_listening_process_is_found_occupied() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(
            SettingsError, match=f"weightTransfer.port={port}: the port is occupied"
        ):
            check_port_is_free("weightTransfer.port", port)
    check_port_is_free("weightTransfer.port", port)
