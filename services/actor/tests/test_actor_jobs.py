"""Every job file that comes along is valid, and its task loads."""

import json
from pathlib import Path

import pytest

from pipelinerl_actor.task import Task, TaskName
from pipelinerl_actor.task_loader import load_task
from pipelinerl_common.settings import Job, load_job

JOBS = Path(__file__).resolve().parents[3] / "e2e" / "jobs"
FILES = sorted(JOBS.glob("*.yaml"))


def test_there_are_jobs() -> None:
    assert {file.stem for file in FILES} >= {
        "arithmetic",
        "arithmetic-conventional",
        "math",
        "reasoning-gym",
    }


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_job_file_is_valid_and_its_task_gives_prompts(file: Path, tmp_path: Path) -> None:
    problems = tmp_path / "problems.jsonl"
    problems.write_text(json.dumps({"problem": "What is 1+1?", "answer": "2"}))
    task = load_job(file).spec.task
    args = {**task.args, **({"data": str(problems)} if "data" in task.args else {})}
    loaded = load_task(TaskName(task.path, args, seed=0))
    assert isinstance(loaded, Task)
    assert loaded.prompt(0).messages == loaded.prompt(0).messages != ()


def test_the_conventional_job_differs_in_name_and_staleness_only() -> None:
    pipelined, conventional = (
        _dump(load_job(JOBS / "arithmetic.yaml")),
        _dump(load_job(JOBS / "arithmetic-conventional.yaml")),
    )
    different = {name for name in pipelined if pipelined[name] != conventional[name]}
    assert different == {"staleness"}


def test_the_job_with_adapters_differs_in_the_model_and_the_learning_rate_only() -> None:
    whole, adapted = (
        _dump(load_job(JOBS / "arithmetic.yaml")),
        _dump(load_job(JOBS / "arithmetic-lora.yaml")),
    )
    assert {name for name in whole if whole[name] != adapted[name]} == {"model", "algorithm"}


def _dump(job: Job) -> dict[str, object]:
    dumped: dict[str, object] = job.spec.model_dump()
    return dumped
