"""Any data set of reasoning-gym by its name: endless generated problems with the data set's own
scoring.
"""

import random
from typing import Any

from pipelinerl_actor.task import Prompt, Task, Turn, Verdict
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.text import close_matches

DEFAULT_SYSTEM = (
    "Think step by step, then give the final answer between <answer> and </answer>. "
    "Put nothing but the answer between the tags, in exactly the form that the question asks for."
)


class ReasoningGym(Task):
    """Problems of the data set named `dataset`, with the parameters `config`; `system` is the
    system message ("" for none).
    """

    def __init__(
        self,
        *,
        seed: int,
        dataset: str,
        config: dict[str, Any] | None = None,
        system: str = DEFAULT_SYSTEM,
        size: int = 1_000_000,
    ) -> None:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if dataset not in DATASETS:
            close = close_matches(dataset, DATASETS, most=5)
            hint = (
                f"did you mean {', '.join(close)}?"
                if close
                else f"it has {', '.join(sorted(DATASETS))}"
            )
            raise SettingsError(
                f"spec.task.args.dataset={dataset!r}: reasoning-gym has no such data set; {hint}"
            )
        if size < 1:
            raise SettingsError(f"spec.task.args.size={size} must be at least 1")
        own = {"seed": random.Random(f"reasoning_gym {seed}").randrange(1 << 30), "size": size}
        try:
            self._problems = reasoning_gym.create_dataset(dataset, **{**own, **(config or {})})
        except (TypeError, ValueError, AssertionError) as error:
            raise SettingsError(
                f"spec.task.args.config={config} does not fit the data set {dataset!r}: {error}"
            ) from error
        self._size = size
        self._system = system

    def prompt(self, index: int) -> Prompt:
        problem = self._problems[index % self._size]
        return Prompt.after_system(self._system, problem["question"], problem=problem)

    def verify(self, prompt: Prompt, answer: Turn) -> Verdict:
        """The data set's score of the last <answer>, or of the whole text without tags. Runs in a
        verifier's process.
        """
        from reasoning_gym.utils import extract_answer

        extracted = extract_answer(answer.text)
        given = answer.text.strip() if extracted is None else extracted
        score = float(self._problems.score_answer(given, prompt.facts["problem"]))
        return Verdict(
            score, {"success": float(score >= 1.0), "tagged": float(extracted is not None)}
        )
