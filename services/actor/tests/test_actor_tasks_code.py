"""The code task: both forms of tests, shares, and programs that try to look right."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipelinerl_actor.dataset import DataSettings
from pipelinerl_actor.sandbox import SandboxLimits
from pipelinerl_actor.task import Turn, Verdict
from pipelinerl_actor.tasks.code import Code, extract_program
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.types import FinishReason

pytestmark = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is not installed: apt install bubblewrap"
)

SQUARE = {
    "problem": "Print the square.",
    "tests": [{"input": "3", "output": "9"}, {"input": "-4", "output": "16\n"}],
}
FUNCTION = {"problem": "Write f.", "tests": ["assert f(3) == 9", "assert f(-4) == 16"]}


def task_of(tmp_path: Path, row: dict[str, Any], **args: Any) -> Code:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    return Code(seed=0, data=DataSettings(path=str(file)), **args)


def judge(task: Code, program: str) -> Verdict:
    return task.verify(
        task.prompt(0),
        Turn(f"Let me think.\n```python\n{program}\n```", (), (), (), FinishReason.STOP),
    )


@pytest.mark.parametrize(
    ("program", "share"),
    [
        ("print(int(input()) ** 2)", 1.0),
        ("print(int(input()) ** 2, '  ')\nprint()", 1.0),
        ("print(9)", 0.5),
        ("print(int(input()) ** 2)\nraise SystemExit(1)", 0.0),
        ("syntax error", 0.0),
    ],
)
def test_examples_compare_what_is_printed(tmp_path: Path, program: str, share: float) -> None:
    assert judge(task_of(tmp_path, SQUARE, reward="share"), program).reward == share
    assert judge(task_of(tmp_path, SQUARE), program).reward == float(share == 1.0)


@pytest.mark.parametrize(
    ("program", "share"),
    [
        ("def f(x): return x * x", 1.0),
        ("f = lambda x: 9", 0.5),
        ("def f(x): raise ValueError", 0.0),
        ("def f(x): return x * x\nimport os; os._exit(0)", 0.0),
        ("import sys; sys.exit(0)", 0.0),
        ("print('passed')\nf = None", 0.0),
        (
            "f = type('Any', (), {'__call__': lambda s, x: s, '__eq__': lambda s, o: True})()",
            1.0,
        ),  # no test can see through it
    ],
)
def test_statements_run_after_the_program(tmp_path: Path, program: str, share: float) -> None:
    verdict = judge(task_of(tmp_path, FUNCTION, reward="share"), program)
    assert verdict.reward == share
    assert verdict.metrics == {
        "success": float(share == 1.0),
        "answered": 1.0,
        "tests_passed": share,
    }


def test_a_program_out_of_time_fails(tmp_path: Path) -> None:
    assert (
        judge(task_of(tmp_path, SQUARE, limits=SandboxLimits(seconds=5)), "while True: pass").reward
        == 0
    )


def test_an_answer_without_a_program_fails(tmp_path: Path) -> None:
    task = task_of(tmp_path, SQUARE)
    verdict = task.verify(task.prompt(0), Turn("print(9)", (), (), (), FinishReason.STOP))
    assert verdict == Verdict(0.0, {"success": 0.0, "answered": 0.0, "tests_passed": 0.0})


def test_the_last_block_is_the_program() -> None:
    assert extract_program("```python\na\n```\nbetter:\n```py\nb\n```\ndone") == "b\n"
    assert extract_program("```\nc\n```") == "c\n"
    assert extract_program("```bash\nd\n```") is None


def test_tests_may_be_json_in_a_text(tmp_path: Path) -> None:
    task = task_of(tmp_path, {**SQUARE, "tests": json.dumps(SQUARE["tests"])})
    assert judge(task, "print(int(input()) ** 2)").reward == 1


@pytest.mark.parametrize(
    ("tests", "complaint"),
    [
        ([], r"rows\.jsonl:1: 'tests' is \[\], not a list of tests"),
        ("{", r"rows\.jsonl:1: 'tests' is a text, but not JSON"),
        ([{"input": "3"}], r"a test is a statement or"),
        (["assert f()", {"input": "3", "output": "9"}], r"'tests' holds 'assert f\(\)'"),
    ],
)
def test_tests_of_a_wrong_form_are_named(tmp_path: Path, tests: object, complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        task_of(tmp_path, {"problem": "p", "tests": tests})
