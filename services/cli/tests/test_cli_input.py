"""Bad input: one message that names the field, the value and the remedy, exit status 2, and nothing
started or left behind.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from pipelinerl_cli.__main__ import COMMANDS, main
from pipelinerl_cli.run_folder import RunFolder, newest_checkpoint
from pipelinerl_cli.up import checks
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import load_job

JOB = """
apiVersion: pipelinerl.dev/v1alpha1
kind: PipelineRLJob
metadata: {name: sums}
spec:
  model: {uri: "tiny://arithmetic"}
  task: {path: "tasks:Sums", args: {limit: null}}
  staleness: {policy: areal, eta: 3}
  weightTransfer: {backend: gloo}
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


@pytest.fixture
def refused(
    job_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs `pipelinerl up` with more arguments and returns the message; it must refuse without
    leaving anything behind.
    """

    def run(*arguments: str, leaves: tuple[str, ...] = ()) -> str:
        assert main(["up", str(job_file), "--output", str(tmp_path / "run"), *arguments]) == 2
        output = tmp_path / "run"
        left = (
            sorted(path.name for path in output.iterdir() if path.name != "lock")
            if output.is_dir()
            else []
        )
        assert left == sorted(leaves)
        return capsys.readouterr().err

    return run


class Case(NamedTuple):
    override: str
    message: str


@pytest.mark.parametrize(
    "case",
    [
        Case("algorithm.stepz=3", "unknown field; did you mean 'steps'?"),
        Case("algorithm.steps=0", "algorithm.steps"),
        Case("algorithm.steps", "expected path=value"),
        Case("model.uri=/no/such/folder", "model.uri=/no/such/folder: there is no such folder"),
        Case("model.uri=s3://bucket/model", "unknown scheme 's3'; use a folder, hf:// or tiny://"),
        Case("staleness.policy=psychic", "psychic"),
        Case(
            "weightTransfer.backend=nccl",
            "weightTransfer.backend=nccl needs GPUs, but actors.gpusPerReplica=0",
        ),
        Case(
            "stream.maxBytes=1",
            "stream.maxBytes: Input should be greater than or equal to 1048576 (got 1)",
        ),
        Case("algorithm.kl.coefficient=0.1", "add 'reference: {}' or set the coefficient to 0"),
    ],
    ids=lambda case: case.override,
)
def test_wrong_setting_is_refused(refused: Callable[..., str], case: Case) -> None:
    assert case.message in refused("--set", case.override)


def test_what_only_kubernetes_reads_is_said_in_one_line(
    job_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = (
        "--set",
        "scheduling.priorityClassName=high",
        "--set",
        "actors.podTemplate.spec.nodeName=node-1",
    )
    refused = ("--set", "model.uri=/no/such/folder")
    assert main(["up", str(job_file), "--output", str(tmp_path / "run"), *overrides, *refused]) == 2
    assert (
        capsys.readouterr().out
        == "only Kubernetes reads actors.podTemplate, scheduling: ignored here\n"
    )


def test_missing_and_malformed_job_files_are_refused(
    job_file: Path, refused: Callable[..., str]
) -> None:
    job_file.write_text("spec: [")
    assert "not valid YAML" in refused()
    job_file.unlink()
    assert "job.yaml: there is no such file; give a job file (YAML)" in refused()


def test_model_folder_without_a_model_is_refused(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    assert "has no config.json" in refused("--set", f"model.uri={tmp_path / 'model'}")


def test_occupied_port_is_named(refused: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        message = refused("--set", f"weightTransfer.port={port}")
    assert f"weightTransfer.port={port}: the port is occupied" in message


def test_missing_package_is_named_with_its_extra(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name in ("vllm", "deepspeed") else object()
    )
    message = refused()
    assert "not installed: deepspeed; run pip install 'pipelinerl[trainer]'" in message
    assert "actors.generator.engine=vllm: vllm is not installed" in message
    assert message.startswith("pipelinerl up: Fix 2 problems first")


def test_a_stream_that_does_not_fit_the_disk_is_named(refused: Callable[..., str]) -> None:
    message = refused("--set", f"stream.maxBytes={1 << 60}")
    assert (
        "stream.maxBytes=1152921504606846976: the streams' reservation takes 1537228673.9 GB of "
        "free disk" in message
    )


def test_a_remedy_for_a_full_disk_is_one_that_works(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The streams beside the samples take 768 MiB, at 75 % of the free disk 1.07 GB."""

    def refusal(max_bytes: int, free: int) -> str:
        monkeypatch.setattr(
            "pipelinerl_cli.up.checks.shutil.disk_usage", lambda path: SimpleNamespace(free=free)
        )
        job = load_job(job_file, [f"stream.maxBytes={max_bytes}"])
        with pytest.raises(SettingsError) as refused:
            checks.check(job, tmp_path / "run")
        return str(refused.value)

    small = refusal(1 << 20, 700_000_000)
    assert "takes 1.1 GB of free disk, 1.1 GB of them whatever maxBytes is" in small
    assert "has 0.7 GB; free 0.4 GB more or choose an --output on another disk" in small
    assert "set it to" not in small
    large = refusal(1 << 30, 2_000_000_000)
    assert "takes 2.5 GB" in large
    highest = int(large.partition("set it to ")[2].partition(" at most")[0])
    assert highest == 662 << 20  # 0.75 * 2 GB are 1430 MiB
    monkeypatch.setattr(
        "pipelinerl_cli.up.checks.shutil.disk_usage",
        lambda path: SimpleNamespace(free=2_000_000_000),
    )
    assert (
        checks._stream(load_job(job_file, [f"stream.maxBytes={highest}"]), tmp_path / "run") == []
    )
    assert (
        checks._stream(
            load_job(job_file, [f"stream.maxBytes={highest + (1 << 20)}"]), tmp_path / "run"
        )
        != []
    )


def test_gpus_that_the_machine_lacks_are_named(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    message = refused("--set", "actors.gpusPerReplica=1")
    assert (
        "actors.gpusPerReplica=1: the job needs 2 GPUs (generator 1, trainer 1), this machine has 0"
        in message
    )
    assert "gpusPerReplica=0 with weightTransfer.backend=gloo runs on the CPU" in message


def test_a_model_that_the_gpus_cannot_hold_is_refused_before_anything_starts(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 152064}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **heads}))
    changes = [f"model.uri={tmp_path}", "actors.gpusPerReplica=1", "model.dtype=bfloat16"]
    job = load_job(job_file, changes)
    assert checks._memory(job) == []  # no GPU here: the count is refused, not the size
    monkeypatch.setattr(checks, "_gpu_bytes", lambda _: 85_000_000_000)
    trainer, generator = checks._memory(job)
    assert "trainer rank 0 needs" in trainer
    assert "tensorParallelSize" in generator
    cached = "huggingface_hub.try_to_load_from_cache"
    monkeypatch.setattr(cached, lambda *_, **__: str(tmp_path / "config.json"))
    hub_job = load_job(job_file, [*changes, "model.uri=hf://some/model"])
    assert checks._memory(hub_job) == [trainer, generator]  # of its cached configuration
    assert checks._model_bytes(hub_job) == pytest.approx(2 * 72.7e9, rel=0.001)
    monkeypatch.setattr(checks, "_gpu_bytes", lambda _: None)
    assert checks._memory(job) == []


def test_full_disk_is_named_with_what_is_needed(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "MIN_FREE_BYTES", 1 << 60)
    assert "GB free, about 1152921504.6 GB needed" in refused()


@pytest.mark.parametrize(
    ("uri", "gigabytes"),
    [
        ("hf://Qwen/Qwen2.5-7B", 14.0),
        ("hf://Qwen/Qwen3-30B-A3B", 60.0),
        ("hf://HuggingFaceTB/SmolLM2-135M", 0.27),
        ("hf://mistralai/Mixtral-8x7B", 0.0),  # the name does not say how many there are
        ("hf://openai-community/gpt2", 0.0),
    ],
)
def test_the_disk_check_knows_the_size_of_a_hub_model(
    uri: str, gigabytes: float, job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    changes = [f"model.uri={uri}", "model.dtype=bfloat16", "trainers.checkpoint.keep=2"]
    job = load_job(job_file, changes)
    assert checks._model_bytes(job) == pytest.approx(gigabytes * 1e9)
    # The model and three checkpoints, each seven times as large.
    monkeypatch.setattr(checks, "_free_bytes", lambda _: int(gigabytes * 1e9 * 22) + 600_000_000)
    assert checks._disk(job, tmp_path) == []
    if gigabytes:
        monkeypatch.setattr(checks, "_free_bytes", lambda _: int(gigabytes * 1e9 * 21))
        (problem,) = checks._disk(job, tmp_path)
        assert f"about {gigabytes * 22:.1f} GB needed" in problem


def test_folder_with_other_files_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").touch()
    assert "holds other files (thesis.tex)" in refused(leaves=("thesis.tex",))


def test_output_that_is_a_file_is_refused(
    job_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    job_file.write_text(
        JOB.replace(
            '"tasks:Sums", args: {limit: null}', '"pipelinerl_actor.tasks.arithmetic:Arithmetic"'
        )
    )
    assert main(["up", str(job_file), "--output", str(tmp_path / "file")]) == 2
    assert "cannot be written to" in capsys.readouterr().err


def test_folder_of_another_job_or_of_other_settings_is_refused(
    refused: Callable[..., str], tmp_path: Path, job_file: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.make()
    folder.write_job(load_job(job_file, ["seed=4"]))
    assert "other settings (seed: 4 -> 0)" in refused(leaves=("job.yaml", "logs"))
    job_file.write_text(JOB.replace("sums", "products"))
    assert "holds a run of the job 'sums', not of 'products'" in refused(
        leaves=("job.yaml", "logs")
    )


@pytest.mark.parametrize("steps", ["0", "-3", "many", "1.5"])
def test_max_steps_must_be_a_positive_number(
    job_file: Path, steps: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["up", str(job_file), "--max-steps", steps])
    assert stopped.value.code == 2
    assert "whole number of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["report", "compare"])
def test_folder_that_is_not_a_run_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [command, str(tmp_path), str(tmp_path)]
            if command == "compare"
            else [command, str(tmp_path)]
        )
        == 2
    )
    assert "not a run's folder: it has no job.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        "watch DIR",
        "report DIR",
        "compare DIR DIR",
        "doctor DIR",
        "replay DIR",
        "eval DIR JOB",
        "simulate --from-run DIR",
    ],
)
@pytest.mark.parametrize("given", ["my_first", "runs/my_first"])
def test_a_run_folder_of_nearly_the_name_is_proposed(
    command: str,
    given: str,
    job_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(job_file.parent)
    Path("runs/my-first").mkdir(parents=True)
    assert (
        main([{"DIR": given, "JOB": str(job_file)}.get(word, word) for word in command.split()])
        == 2
    )
    assert "did you mean runs/my-first?" in capsys.readouterr().err


def test_a_tasks_name_in_place_of_a_job_file_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(tmp_path), "my_first:MyFirst"]) == 2
    assert (
        "my_first:MyFirst: this is the name of a task, but a job file (YAML) is needed here"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            "path: pipelinerl_actor.tasks.arithmetic:Arithmetic, args: {digit: 1}",
            "has no argument 'digit'; it has digits; did",
        ),
        (
            "path: my_tasks:Sums, args: {limit: many}",
            "spec.task.args of my_tasks:Sums: limit: Input should be a valid integer",
        ),
        ("path: my_tasks:Nums", "my_tasks has no 'Nums'; did you mean 'Sums'?"),
        (
            "path: leaves:Sums",
            "spec.task.path='leaves:Sums': the process that makes it ended with status 3: a last "
            "word",
        ),
    ],
)
def test_a_wrong_task_is_refused_before_a_folder_is_made(
    task: str,
    message: str,
    job_file: Path,
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(job_file.parent)
    job_file.write_text(JOB.replace('path: "tasks:Sums", args: {limit: null}', task))
    Path("my_tasks.py").write_text(
        "from pipelinerl_actor.task import Task\n"
        "class Sums(Task):\n    def __init__(self, *, limit: int): ...\n    def prompt(self, "
        "index): ...\n"
    )
    Path("leaves.py").write_text(
        "import os, sys\nprint('a last word', file=sys.stderr, flush=True)\nos._exit(3)\n"
    )
    assert message in refused("--set", "actors.generator.engine=transformers")


def test_unknown_command_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["down"])
    assert stopped.value.code == 2
    assert "'up'" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=str)
def test_help_needs_no_heavy_module(command: list[str]) -> None:
    program = (
        "import sys\nfrom pipelinerl_cli.__main__ import main\n"
        f"try:\n    main([*{command!r}, '--help'])\nexcept SystemExit as stopped:\n    assert "
        "stopped.code == 0\n"
        "print(sorted({'torch', 'grpc', 'nats', 'pydantic', 'rich', 'aiohttp'} & set(sys.modules)))"
    )
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert "usage: pipelinerl" in done.stdout
    assert time.monotonic() - began < 30


def test_effective_job_is_read_back_as_it_was(tmp_path: Path, job_file: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.make()
    job = load_job(job_file, ["algorithm.steps=7", "weightTransfer.backend=gloo"])
    folder.write_job(job)
    again = load_job(folder.job_file)
    assert again == job
    assert again.spec.task.args == {"limit": None}
    assert again.spec.staleness.parameters == {"eta": 3}


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with (
        pytest.raises(SettingsError, match=r"cannot be written to.*choose another --output"),
        RunFolder(tmp_path).locked(),
    ):
        pass


def test_a_torn_checkpoint_does_not_count(tmp_path: Path) -> None:
    for step in (3, 7):
        folder = tmp_path / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"1234")
        (folder / "manifest.json").write_text(json.dumps({"step": step, "files": {"weights": 4}}))
    assert newest_checkpoint(tmp_path) == 7
    (folder / "weights").write_bytes(b"12")
    assert newest_checkpoint(tmp_path) == 3
    (folder / "manifest.json").write_text('{"step": 7, "fil')
    assert newest_checkpoint(tmp_path) == 3


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_nobody_reads_ends_quietly(unbuffered: str) -> None:
    command = [sys.executable, "-m", "pipelinerl_cli", "plan"]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode == 141
