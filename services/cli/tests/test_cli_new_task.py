"""`pipelinerl new-task`: what it writes can be run as it is, and nothing is overwritten."""

import importlib.util
import subprocess
import sysconfig
from pathlib import Path

import pytest

from pipelinerl_actor.task import TaskName, Turn
from pipelinerl_actor.task_loader import load_task
from pipelinerl_cli.__main__ import main
from pipelinerl_cli.doctor.rules import diagnose_job
from pipelinerl_common.runs.facts import JobFacts
from pipelinerl_common.settings import load_job
from pipelinerl_common.types import FinishReason

ROOT = Path(__file__).parents[3]


async def test_the_files_make_a_job_with_a_task_that_judges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new-task", "even_numbers", "--folder", str(tmp_path)]) == 0
    assert f"cd {tmp_path}; pipelinerl up even_numbers.yaml" in capsys.readouterr().out
    job = load_job(tmp_path / "even_numbers.yaml")
    assert job.name == "even-numbers"
    assert diagnose_job(JobFacts(job)) == []
    monkeypatch.syspath_prepend(str(tmp_path))
    task = load_task(TaskName(job.spec.task.path, job.spec.task.args, job.spec.seed))
    assert type(task).__name__ == "EvenNumbers"
    prompt = task.prompt(3)
    assert prompt == task.prompt(3)
    rewards = []
    for text in ("8", "7", "x", "20"):
        outcome = task.verify(prompt, Turn(text, (), (), (), FinishReason.STOP))
        rewards.append((await outcome).reward)  # type: ignore[misc]
    assert rewards == [1.0, 0.0, 0.0, 0.0]
    assert importlib.util.find_spec("even_numbers") is not None


def test_the_task_is_formatted_like_the_repository(tmp_path: Path) -> None:
    """It may be written into a clone, whose checks cover every file."""
    assert main(["new-task", "formatted_sums", "--folder", str(tmp_path)]) == 0
    ruff = Path(sysconfig.get_path("scripts")) / "ruff"
    arguments = ["--config", str(ROOT / "pyproject.toml"), str(tmp_path / "formatted_sums.py")]
    for check in (["format", "--check"], ["check"]):
        command = [str(ruff), *check, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text("precious")
    assert main(["new-task", "mine", "--folder", str(tmp_path)]) == 2
    assert "mine.yaml would be overwritten" in capsys.readouterr().err
    assert (tmp_path / "mine.yaml").read_text() == "precious"
    assert not (tmp_path / "mine.py").exists()


@pytest.mark.parametrize("name", ["Mine", "my-task", "1st", "class", "_x", "x_", "a" * 41, "ä"])
def test_names_that_cannot_be_modules_are_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new-task", name, "--folder", str(tmp_path)]) == 2
    assert f"name={name!r}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["json", "sys", "numpy", "pipelinerl_common"])
def test_names_of_modules_that_python_has_are_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new-task", name, "--folder", str(tmp_path)]) == 2
    assert f"choose another, such as {name}_task" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
