"""Mathematics with `math-verify`: problems with known answers from a JSONL file."""

import json
import random
from functools import lru_cache
from pathlib import Path

from pipelinerl_actor.task import Message, Prompt, Task, Turn, Verdict
from pipelinerl_common.errors import SettingsError

DEFAULT_SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
_SYMBOLIC_TIMEOUT_S = 5
"""For parsing and for comparing one answer: what takes longer counts as wrong. Below `task.verifierTimeoutSeconds`."""


class Maths(Task):
    """`file` has one JSON object a line with a problem and its answer (LaTeX or plain), under `problem_field`, `answer_field`.

    Every epoch has the problems in another order.
    """

    def __init__(
        self,
        *,
        seed: int,
        file: str,
        problem_field: str = "problem",
        answer_field: str = "answer",
        system: str = DEFAULT_SYSTEM,
    ) -> None:
        self._problems = _read(Path(file).expanduser(), problem_field, answer_field)
        self._system: tuple[Message, ...] = ({"role": "system", "content": system},) if system else ()
        self._seed = seed
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def prompt(self, index: int) -> Prompt:
        epoch, position = divmod(index, len(self._problems))
        problem, answer = self._problems[self._order(epoch)[position]]
        return Prompt((*self._system, {"role": "user", "content": problem}), {"answer": answer})

    def verify(self, prompt: Prompt, answer: Turn) -> Verdict:
        """1 for an answer equal to the known one, else 0. In a verifier's process: math-verify needs signals and may hang."""
        from math_verify import parse, verify

        known = parse(f"\\boxed{{{prompt.facts['answer']}}}", parsing_timeout=_SYMBOLIC_TIMEOUT_S)
        if not known:
            raise ValueError(f"math-verify cannot read the known answer {prompt.facts['answer']!r}")
        given = parse(answer.text, parsing_timeout=_SYMBOLIC_TIMEOUT_S)
        success = float(verify(known, given, timeout_seconds=_SYMBOLIC_TIMEOUT_S))
        return Verdict(success, {"success": success, "answered": float(bool(given))})

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._problems)))
        random.Random(f"maths {self._seed} {epoch}").shuffle(order)
        return order


def _read(file: Path, problem_field: str, answer_field: str) -> list[tuple[str, str]]:
    """(problem, answer) of every line. Raises SettingsError that names file and line."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"spec.task.args.file: {file.absolute()} cannot be read: {error}") from error
    problems = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            problems.append(_parse_line(line, f"{file}:{number}", problem_field, answer_field))
    if not problems:
        raise SettingsError(f"spec.task.args.file: {file} holds no problem; it needs one JSON object a line")
    return problems


def _parse_line(line: str, where: str, problem_field: str, answer_field: str) -> tuple[str, str]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise SettingsError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise SettingsError(f"{where}: a {type(record).__name__}, not an object with {problem_field!r} and {answer_field!r}")
    for name in (problem_field, answer_field):
        if name not in record:
            raise SettingsError(f"{where}: no field {name!r}; it has {', '.join(map(repr, record)) or 'none'}")
    problem, answer = record[problem_field], record[answer_field]
    if not isinstance(problem, str) or not problem.strip():
        raise SettingsError(f"{where}: {problem_field!r} is {problem!r}, not a text")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
        raise SettingsError(f"{where}: {answer_field!r} is {answer!r}, not a text or a number")
    return problem, str(answer)
