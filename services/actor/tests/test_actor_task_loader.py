"""Loading tasks: what is right works, what is wrong is named with its remedy."""

from pathlib import Path

import pytest

from pipelinerl_actor.task import Task, TaskName
from pipelinerl_actor.task_loader import FunctionTask, load_task
from pipelinerl_common.errors import SettingsError

MODULE = """
from tempfile import TemporaryDirectory
from typing import Literal
from pipelinerl_actor.dataset import DataSettings
from pipelinerl_actor.task import Prompt, Task, Verdict

class Good(Task):
    def __init__(self, *, seed: int, words: int = 3, mode: Literal["a", "b"] = "a", copy: str = ""):
        self.seed, self.words, self.mode, self.copy = seed, words, mode, copy
    def prompt(self, index):
        return Prompt.of(str(index))

class Fed(Task):
    def __init__(self, *, data: DataSettings, model_dump: int | DataSettings | None = None):
        self.data = data
    def prompt(self, index):
        return Prompt.of("")

class Needy(Task):
    def __init__(self, *, file: str):
        if file == "missing":
            raise FileNotFoundError("no file called missing")
    def prompt(self, index):
        return Prompt.of("")

class Open(Task):
    def __init__(self, **anything):
        self.anything = anything
    def prompt(self, index):
        return Prompt.of("")

class Abstract(Task):
    pass

async def function(rollout, *, words: int = 3):
    return Verdict(1.0)

async def no_rollout(*, words: int):
    return Verdict(1.0)

def plain(rollout):
    return Verdict(1.0)

def made(*, seed: int, words: int):
    return Good(seed=seed, words=words)
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loader_tasks.py").write_text(MODULE)
    (tmp_path / "loader_broken.py").write_text("raise RuntimeError('broken at import')")
    (tmp_path / "loader_needs.py").write_text("import no_such_package_anywhere")
    monkeypatch.syspath_prepend(str(tmp_path))


def load(path: str, **args: object) -> Task:
    return load_task(TaskName(path, args, seed=7))


def test_a_class_gets_its_args_and_the_seed() -> None:
    task = load("loader_tasks:Good", words=5, mode="b", copy="x")
    assert (task.seed, task.words, task.mode, task.copy) == (7, 5, "b", "x")  # type: ignore[attr-defined]


def test_a_class_without_a_seed_is_not_given_one() -> None:
    assert load("loader_tasks:Needy", file="there")
    assert load("loader_tasks:Open", x=1).anything == {"x": 1}  # type: ignore[attr-defined]


def test_a_function_may_make_the_task() -> None:
    task = load("loader_tasks:made", words=5)
    assert (task.seed, task.words) == (7, 5)  # type: ignore[attr-defined]


def test_an_async_function_is_a_task() -> None:
    assert isinstance(load("loader_tasks:function", words=2), FunctionTask)


@pytest.mark.parametrize(
    ("path", "args", "complaint"),
    [
        (
            "no.such:Task",
            {},
            r"there is no module 'no'; install the package that holds it, or put its folder on "
            r"PYTHONPATH",
        ),
        (
            "loader_needs:Task",
            {},
            r"loader_needs imports 'no_such_package_anywhere', which is not installed",
        ),
        (
            "loader_broken:Task",
            {},
            r"importing loader_broken failed with RuntimeError: broken at import",
        ),
        ("loader_tasks:Goood", {}, r"has no 'Goood'; did you mean 'Good'\?"),
        (
            "loader_tasks:TemporaryDirectory",
            {},
            r"neither a subclass of pipelinerl_actor.task.Task nor a function",
        ),
        ("loader_tasks:plain", {}, r"needs the argument 'rollout'"),
        (
            "loader_tasks:plain",
            {"rollout": 1},
            r"the function returned a Verdict; it must return a Task",
        ),
        ("loader_tasks:made", {"words": "many"}, r"words: .*valid integer.*\(got 'many'\)"),
        ("loader_tasks:Abstract", {}, r"the class lacks prompt"),
        ("loader_tasks:no_rollout", {}, r"must take a Rollout as its first argument"),
        (
            "loader_tasks:Good",
            {"word": 1},
            r"has no argument 'word'; it has words, mode, copy; did you mean 'words'\?",
        ),
        ("loader_tasks:function", {"seed": 1}, r"has no argument 'seed'; it has words"),
        ("loader_tasks:Good", {"words": "many"}, r"words: .*valid integer.*\(got 'many'\)"),
        ("loader_tasks:Good", {"mode": "c"}, r"mode: Input should be 'a' or 'b' \(got 'c'\)"),
        (
            "loader_tasks:Fed",
            {"data": {"path": "data.jsonl", "splt": "train"}},
            r"args of loader_tasks:Fed: data\.splt: unknown field; did you mean 'split'\?$",
        ),
        (
            "loader_tasks:Fed",
            {"data": {"path": "a", "difficulty": {"field": "b", "mx": 1}}},
            r"data\.difficulty\.mx: unknown field; did you mean 'max'\?",
        ),
        ("loader_tasks:Fed", {"data": {"split": "train"}}, r"data\.path: missing"),
        (
            "loader_tasks:Fed",
            {"data": "a", "model_dump": {"path": "b", "splt": "c"}},
            r"model_dump\.DataSettings\.splt: unknown field; did you mean 'split'\?",
        ),
        ("loader_tasks:Needy", {}, r"needs the argument 'file'"),
        (
            "loader_tasks:Needy",
            {"file": "missing"},
            r"failed to start with FileNotFoundError: no file called missing",
        ),
    ],
)
def test_every_mistake_is_named(path: str, args: dict[str, object], complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        load(path, **args)
