"""Mathematics with `math-verify`: problems with known answers from files."""

from typing import NamedTuple

from pipelinerl_actor.dataset import DatasetRow, DataSettings, Problems, field_of, text_of
from pipelinerl_actor.task import Prompt, Task, Turn, Verdict
from pipelinerl_common.errors import SettingsError

DEFAULT_SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
_SYMBOLIC_TIMEOUT_S = 5
"""Limit for parsing and for comparing one answer, below `task.verifierTimeoutSeconds`; after it the
answer counts as wrong.
"""


class MathsProblem(NamedTuple):
    """A problem and its known answer."""

    text: str
    answer: str
    """LaTeX or plain."""


class Maths(Task):
    """Problems with known answers, from the fields `problem_field` and `answer_field` of the rows
    of `data`; `system` is the system message.
    """

    def __init__(
        self,
        *,
        seed: int,
        data: DataSettings,
        problem_field: str = "problem",
        answer_field: str = "answer",
        system: str = DEFAULT_SYSTEM,
    ) -> None:
        def parse(row: DatasetRow) -> MathsProblem:
            return MathsProblem(text_of(row, problem_field), _answer(row, answer_field))

        self._problems = Problems.load(data, seed, parse)
        self._system = system

    def prompt(self, index: int) -> Prompt:
        problem = self._problems[index]
        return Prompt.after_system(self._system, problem.text, answer=problem.answer)

    def verify(self, prompt: Prompt, answer: Turn) -> Verdict:
        """1 for an answer equal to the known one, else 0. Runs in a verifier's process, since
        math-verify needs signals and may hang.
        """
        from math_verify import parse, verify

        known = parse(f"\\boxed{{{prompt.facts['answer']}}}", parsing_timeout=_SYMBOLIC_TIMEOUT_S)
        if not known:
            raise ValueError(f"math-verify cannot read the known answer {prompt.facts['answer']!r}")
        given = parse(answer.text, parsing_timeout=_SYMBOLIC_TIMEOUT_S)
        success = float(verify(known, given, timeout_seconds=_SYMBOLIC_TIMEOUT_S))
        return Verdict(success, {"success": success, "answered": float(bool(given))})


def _answer(row: DatasetRow, name: str) -> str:
    answer = field_of(row, name)
    if (
        isinstance(answer, bool)
        or not isinstance(answer, str | int | float)
        or not str(answer).strip()
    ):
        raise SettingsError(f"{row.place}: {name!r} is {answer!r}, not a text or a number")
    return str(answer)
