"""Programs that must pass tests: Python, judged in a sandbox without network.

Rows have a problem and its tests, in either of two forms: stdin and stdout, compared by line; or
statements that run after the program.

    {"problem": "Read n, print n squared.", "tests": [{"input": "3", "output": "9"}]}
    {"problem": "Write a function f(n).", "tests": ["assert f(3) == 9"]}
"""

import json
import re
import secrets
from collections.abc import Sequence
from typing import Literal, NamedTuple

from pipelinerl_actor.dataset import DatasetRow, DataSettings, Problems, field_of, text_of
from pipelinerl_actor.sandbox import DEFAULT_LIMITS, Sandbox, SandboxLimits
from pipelinerl_actor.task import Prompt, Task, Turn, Verdict
from pipelinerl_common.errors import SettingsError

DEFAULT_SYSTEM = "Solve the problem in Python. Put the whole program into one ```python block."
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


class Example(NamedTuple):
    """A test by stdin and stdout."""

    input: str
    output: str


class CodeProblem(NamedTuple):
    """A problem with its tests, all of one form."""

    text: str
    examples: tuple[Example, ...]
    statements: tuple[str, ...]


class Code(Task):
    """Programming problems. `reward` is the share of tests that pass ("share"), or 1 only for all
    of them ("all"); `limits` bound each run.

    Raises SettingsError where bubblewrap cannot confine a program.
    """

    def __init__(
        self,
        *,
        seed: int,
        data: DataSettings,
        problem_field: str = "problem",
        tests_field: str = "tests",
        system: str = DEFAULT_SYSTEM,
        reward: Literal["all", "share"] = "all",
        limits: SandboxLimits = DEFAULT_LIMITS,
    ) -> None:
        def parse(row: DatasetRow) -> CodeProblem:
            return CodeProblem(text_of(row, problem_field), *_tests(row, tests_field))

        self._sandbox = Sandbox(limits)
        self._problems = Problems.load(data, seed, parse)
        self._system = system
        self._reward = reward

    def prompt(self, index: int) -> Prompt:
        problem = self._problems[index]
        return Prompt.after_system(self._system, problem.text, problem=problem)

    def verify(self, prompt: Prompt, answer: Turn) -> Verdict:
        """Runs in a verifier's process, which is killed after the time limit."""
        problem: CodeProblem = prompt.facts["problem"]
        program = extract_program(answer.text)
        if program is None:
            return Verdict(0.0, {"success": 0.0, "answered": 0.0, "tests_passed": 0.0})
        num_tests = len(problem.examples) + len(problem.statements)
        share = (
            self._num_examples(program, problem.examples)
            + self._num_statements(program, problem.statements)
        ) / num_tests
        success = float(share == 1.0)
        return Verdict(
            share if self._reward == "share" else success,
            {"success": success, "answered": 1.0, "tests_passed": share},
        )

    def _num_examples(self, program: str, examples: Sequence[Example]) -> int:
        """Number of examples that pass; "all" stops at the first failure."""
        num_passed = 0
        for example in examples:
            result = self._sandbox.run(program, example.input)
            if result.succeeded and _lines(result.stdout) == _lines(example.output):
                num_passed += 1
            elif self._reward == "all":
                break
        return num_passed

    def _num_statements(self, program: str, statements: Sequence[str]) -> int:
        """Number of statements that pass, in one run: each one that raises nothing prints a mark
        that the program cannot know when it is written.

        A program that searches its own interpreter for the mark can still forge it.
        """
        if not statements:
            return 0
        mark = secrets.token_hex(16)
        judged = "\n".join(
            _judged(statement, f"{mark} {index}") for index, statement in enumerate(statements)
        )
        result = self._sandbox.run(f"{program}\n{judged}", "")
        passed = {line for line in result.stdout.splitlines() if line.startswith(mark)}
        return sum(f"{mark} {index}" in passed for index in range(len(statements)))


def extract_program(text: str) -> str | None:
    """The last fenced block; None without one. The text before it is reasoning."""
    blocks: list[str] = _BLOCK.findall(text)
    return blocks[-1] if blocks else None


def _judged(statement: str, mark: str) -> str:
    return (
        f"try:\n    exec({statement!r}, globals())\n    print({mark!r}, flush=True)\n"
        "except Exception:\n    pass"
    )


def _lines(output: str) -> list[str]:
    """The lines without trailing blanks and without empty lines at the end."""
    return [line.rstrip() for line in output.rstrip().splitlines()]


def _tests(row: DatasetRow, name: str) -> tuple[tuple[Example, ...], tuple[str, ...]]:
    tests = field_of(row, name)
    if isinstance(tests, str):  # data sets without nested fields keep them as JSON
        try:
            tests = json.loads(tests)
        except ValueError as error:
            raise SettingsError(
                f"{row.place}: {name!r} is a text, but not JSON: {error}"
            ) from error
    if not isinstance(tests, list) or not tests:
        raise SettingsError(f"{row.place}: {name!r} is {tests!r}, not a list of tests")
    if all(isinstance(test, str) for test in tests):
        return (), tuple(tests)
    return tuple(_example(test, row, name) for test in tests), ()


def _example(test: object, row: DatasetRow, name: str) -> Example:
    match test:
        case {"input": str(given), "output": str(expected)}:
            return Example(given, expected)
    raise SettingsError(
        f'{row.place}: {name!r} holds {test!r}; a test is a statement or {{"input": text, '
        f'"output": text}}'
    )
