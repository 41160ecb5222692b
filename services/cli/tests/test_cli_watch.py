"""What `pipelinerl watch` sees of a run's folder, and of a job in a cluster through the real
kubectl.
"""

import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console, RenderableType
from test_cli_report import JOB, make_run

from pipelinerl_cli.__main__ import main
from pipelinerl_cli.watch.cluster import ClusterJob
from pipelinerl_cli.watch.run_folder import RunFolderSource
from pipelinerl_common.runs.records import Record
from pipelinerl_operator.controller.status import (
    Condition,
    JobPhase,
    JobStatus,
    LastFailure,
    RoleStatus,
    TrainingStatus,
)

needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="no kubectl: install kubernetes-client"
)


def text_of(panel: RenderableType, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as capture:
        console.print(panel)
    return capture.get()


def append(run: Path, *records: Record) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(record.to_json() + "\n" for record in records)


def step(number: int, reward: float, age_s: float = 0.0) -> Record:
    return Record(
        "trainer",
        "trainer-0",
        time.time() - age_s,
        number,
        {"reward_mean": reward, "lag_mean": 1.0, "ess": 0.9},
    )


def reported(instance: str, age_s: float) -> Record:
    return Record(
        instance.partition("-")[0], instance, time.time() - age_s, -1, {"memory_bytes": 1.0}
    )


@pytest.fixture
def holder() -> Iterator[int]:
    """Process id of something that looks like the `pipelinerl up` of a run."""
    command = [sys.executable, "-c", "print(flush=True); input()", "pipelinerl"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process.pid
    process.communicate(b"\n", timeout=60)


def test_a_finished_run_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", [0.0, 0.5, 1.0])
    (run / "summary.json").write_text('{"status": "finished"}')
    assert main(["watch", str(run)]) == 0
    shown = capsys.readouterr().out
    for expected in ("sums", "step 3/", "1.000", "▁▅█", "3 ready, 8 running", "finished"):
        assert expected in shown


def test_steps_of_a_live_run_are_seen_once_each_as_they_are_written(
    tmp_path: Path, holder: int
) -> None:
    run = make_run(tmp_path / "run", [0.25])
    (run / "lock").write_text(f"{holder}\n")
    (run / "summary.json").write_text('{"status": "interrupted"}')  # of an earlier session
    source = RunFolderSource.open(run)
    append(run, reported("actor-0", 0), reported("preprocessor-0", 0))
    assert len(source.look()) == 1
    append(run, step(2, 0.5), step(3, 0.75))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"role": "trai')
        file.flush()
        assert [line.split()[:4] for line in source.look()] == [
            ["step", "2/1000", "reward", "0.500"],
            ["step", "3/1000", "reward", "0.750"],
        ]
        assert source.look() == []
        file.write(step(4, 1.0).to_json().removeprefix('{"role": "trai') + "\n")
    assert [line.split()[1] for line in source.look()] == ["4/1000"]
    assert not source.has_ended()
    assert "running" in text_of(source.render(100))


def test_without_a_terminal_a_live_run_is_a_line_per_step_until_it_ends(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [0.25, 0.5])
    append(run, step(3, 0.75))  # fresh: another machine may run it
    watching = subprocess.Popen(
        [sys.executable, "-m", "pipelinerl_cli", "watch", str(run), "--interval", "0.1"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert watching.stdout is not None
    assert watching.stdout.readline().startswith(f"sums  {run}  running  step 3/1000, started ")
    assert [watching.stdout.readline().split()[1] for _ in range(3)] == [
        "1/1000",
        "2/1000",
        "3/1000",
    ]
    append(run, step(4, 1.0))
    assert watching.stdout.readline().startswith("step 4/1000  reward 1.000")
    (run / "summary.json").write_text('{"status": "finished"}')
    rest, _ = watching.communicate(timeout=60)
    assert (rest, watching.returncode) == (f"sums  {run}  finished  step 4/1000\n", 0)


def test_without_a_terminal_a_run_that_starts_is_seen_at_once(tmp_path: Path, holder: int) -> None:
    run = make_run(tmp_path / "run", [])
    (run / "lock").write_text(f"{holder}\n")
    watching = subprocess.Popen(
        [sys.executable, "-m", "pipelinerl_cli", "watch", str(run)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert watching.stdout is not None
    assert watching.stdout.readline().startswith(f"sums  {run}  running  step 0/1000, started ")
    watching.kill()
    watching.communicate(timeout=60)


def test_a_killed_run_ends_without_a_result(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [0.25])
    append(run, step(2, 0.5, age_s=100))
    (run / "lock").write_text("999999999\n")
    source = RunFolderSource.open(run)
    source.look()
    assert source.has_ended()
    assert "ended without a result" in text_of(source.render(100))


def test_a_run_that_has_fallen_silent_says_so(tmp_path: Path, holder: int) -> None:
    run = make_run(tmp_path / "run", [0.25])
    (run / "lock").write_text(f"{holder}\n")
    source = RunFolderSource.open(run)
    source.look()
    assert "no record for" in text_of(source.render(100))
    append(run, step(2, 0.5))
    source.look()
    assert "no record" not in text_of(source.render(100))


def test_without_a_terminal_who_falls_silent_is_a_line_and_who_is_heard_of_again_too(
    tmp_path: Path, holder: int
) -> None:
    run = make_run(tmp_path / "run", [])
    (run / "metrics.jsonl").write_text("")
    (run / "lock").write_text(f"{holder}\n")
    append(run, Record("up", "up", time.time() - 60, -1, {"session_started": 1.0}))
    append(
        run,
        *(reported("actor-1", age) for age in (40, 30)),
        *(reported("actor-0", age) for age in (40, 30, 20)),
    )
    append(
        run,
        step(1, 0.5, age_s=15),
        Record("up", "up", time.time() - 10, -1, {"silent_generator-0-0_seconds": 20.0}),
    )
    command = [sys.executable, "-m", "pipelinerl_cli", "watch", str(run), "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline().startswith(f"sums  {run}  running  step 1/1000, started ")
        assert watching.stdout.readline().startswith("step 1/1000")
        assert watching.stdout.readline().startswith("generator-0-0 has not answered for ")
        append(run, reported("actor-0", 1))
        assert watching.stdout.readline().startswith("actor-1 has reported nothing for ")
        append(
            run,
            reported("actor-1", 0),
            Record("up", "up", time.time(), -1, {"silent_generator-0-0_seconds": 0.0}),
        )
        news = {watching.stdout.readline() for _ in range(2)}
        assert news == {
            f"{name} reports again, or has ended\n" for name in ("actor-1", "generator-0-0")
        }
        watching.kill()


def test_a_trainer_that_went_back_to_a_checkpoint_is_told_at_once(tmp_path: Path) -> None:
    def committed(step: int, dropped: float) -> Record:
        values = {"groups_dropped_total{reason=rollback}": dropped}
        return Record("preprocessor", "preprocessor-0", time.time(), step, values)

    run = make_run(tmp_path / "run", [])
    append(run, *(step(number, 0.5) for number in (10, 11, 16)), committed(16, 0), committed(16, 0))
    source = RunFolderSource.open(run)
    assert [line.partition("  ")[0] for line in source.look()] == [
        "step 10/1000",
        "step 11/1000",
        "step 16/1000",
    ]
    append(
        run,
        committed(10, 96),
        committed(10, 96),
        step(11, 0.5),
        committed(11, 96),
        committed(10, 97),
    )
    first, done, again = source.look()
    assert (
        first == "the trainer resumed after step 10: steps 11 to 16 are repeated, 96 groups were "
        "dropped"
    )
    assert done.startswith("step 11/1000")
    assert again == "the trainer resumed after step 10: step 11 is repeated, 1 group was dropped"


def test_what_cannot_be_watched_is_refused_with_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for target, remedy in (
        (tmp_path / "nothing", "--output folder"),
        (tmp_path, "not a run's folder"),
        ("Not_A_Name", "nor the name"),
    ):
        assert main(["watch", str(target)]) == 2
        assert remedy in capsys.readouterr().err


TIME = "2026-01-01T00:00:00Z"
STATUS = JobStatus(
    phase=JobPhase.RUNNING,
    start_time=TIME,
    actors=RoleStatus(
        desired=4,
        ready=3,
        restarts=2,
        last_failure=LastFailure(pod="sums-actor-1", reason="OOMKilled", time=TIME),
    ),
    trainers=RoleStatus(desired=1, ready=1),
    training=TrainingStatus(step=12, lag=1.5, ess=0.93, reward=0.41, samples_per_second=20.5),
    conditions=[
        Condition(type="Running", status="True", reason="Training", last_transition_time=TIME),
        Condition(
            type="Degraded",
            status="True",
            reason="ActorsMissing",
            message="3 of 4 actors are ready",
            last_transition_time=TIME,
        ),
        Condition(type="Failed", status="False", reason="NotFailed", last_transition_time=TIME),
    ],
).written()


class ApiServer(BaseHTTPRequestHandler):
    """As much of the Kubernetes API as `kubectl get` of one custom resource asks for."""

    job: dict[str, Any] = {}

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        group = {
            "name": "pipelinerl.dev",
            "versions": [{"groupVersion": "pipelinerl.dev/v1alpha1", "version": "v1alpha1"}],
        }
        resource = {
            "name": "pipelinerljobs",
            "singularName": "pipelinerljob",
            "namespaced": True,
            "kind": "PipelineRLJob",
        }
        answers: dict[str, Any] = {
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": []},
            "/apis": {
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [{**group, "preferredVersion": group["versions"][0]}],
            },
            "/apis/pipelinerl.dev/v1alpha1": {
                "kind": "APIResourceList",
                "groupVersion": "pipelinerl.dev/v1alpha1",
                "resources": [{**resource, "verbs": ["get", "list", "watch"]}],
            },
            "/apis/pipelinerl.dev/v1alpha1/namespaces/lab/pipelinerljobs/sums": self.job,
        }
        body = answers.get(path)
        missing = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "reason": "NotFound",
            "message": "not found",
            "code": 404,
        }
        text = json.dumps(body or missing).encode()
        self.send_response(200 if body else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[ApiServer]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), ApiServer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [
            {"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
        ],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "users": [{"name": "me", "user": {}}],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))  # kubectl's cache of what the server offers
    document = yaml.safe_load(JOB)
    document["metadata"]["namespace"] = "lab"
    document["spec"]["algorithm"] = {"steps": 1000}
    ApiServer.job = {**document, "status": STATUS}
    yield ApiServer
    server.shutdown()
    server.server_close()
    thread.join(10)


@needs_kubectl
def test_a_job_in_a_cluster_is_shown_from_its_status(cluster: type[ApiServer]) -> None:
    job = ClusterJob.named("sums", namespace="lab", context="here")
    line, trouble = job.look()
    assert line == "Running  step 12/1000  reward 0.410  lag 1.50  ESS 0.930  samples/s 20.5"
    assert trouble.startswith("Degraded=True ActorsMissing: 3 of 4 actors are ready")
    assert job.look() == ()
    assert job.headline() == "sums  Running  step 12/1000"
    shown = text_of(job.render(100))
    for expected in (
        "Running  step 12/1000",
        "0.410",
        "3/4 ready, 2 restarts, last: OOMKilled",
        "1/1 ready",
        "namespace lab",
    ):
        assert expected in shown
    assert "Degraded=True ActorsMissing: 3 of 4 actors are ready" in shown
    assert "Failed=" not in shown
    assert not job.has_ended()
    not_running = {"type": "Running", "status": "False", "reason": "Starting", "message": ""}
    cluster.job["status"] = {**STATUS, "conditions": [not_running]}
    assert job.look() == ("Running=False Starting",)
    done = {
        "phase": "Succeeded",
        "training": {"step": 1000, "reward": 0.9},
        "conditions": [not_running | {"reason": "Finished"}],
    }
    cluster.job["status"] = {**STATUS, **done}
    (line,) = job.look()
    assert line.startswith("Succeeded  step 1000/1000  reward 0.900  lag -")
    assert job.has_ended()


@needs_kubectl
def test_a_job_that_the_cluster_does_not_have_is_refused(
    cluster: type[ApiServer], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", "other", "--namespace", "lab", "--once"]) == 2
    assert "no job in the cluster" in capsys.readouterr().err


@needs_kubectl
def test_neither_a_folder_nor_a_cluster_is_said_in_one_message(
    cluster: type[ApiServer],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = Path(os.environ["KUBECONFIG"])
    config.write_text(config.read_text().replace("http://127.0.0.1", "http://127.0.0.2"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "nopes").mkdir(parents=True)
    assert main(["watch", "nope", "--once"]) == 1
    error = capsys.readouterr().err
    assert (
        "nope: is no folder here, and no cluster can be asked for a job of this name: kubectl: "
        in error
    )
    assert "did you mean runs/nopes?" in error


@needs_kubectl
def test_a_cluster_that_stops_answering_leaves_the_last_numbers_and_says_so(
    cluster: type[ApiServer],
) -> None:
    job = ClusterJob.named("sums", namespace="lab", context=None)
    job.look()
    (Path(os.environ["KUBECONFIG"])).write_text(
        Path(os.environ["KUBECONFIG"]).read_text().replace("http://127.0.0.1", "http://127.0.0.2")
    )
    (trouble,) = job.look()
    assert trouble.startswith("kubectl")
    shown = text_of(job.render(100))
    assert "0.410" in shown
    assert "kubectl: " in shown
    assert job.look() == (), "it is said once"
