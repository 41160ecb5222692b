"""Addition of two random numbers, with an exact check: the task of the first job."""

import random

from pipelinerl_actor.task import Prompt, Task, Turn, Verdict
from pipelinerl_common.errors import SettingsError


class Arithmetic(Task):
    """Prompts such as "3+4="; the answer must be exactly the sum's digits and the end of turn."""

    def __init__(self, *, seed: int, digits: int = 1) -> None:
        if not 1 <= digits <= 9:
            raise SettingsError(f"spec.task.args.digits={digits} must be 1 to 9")
        self._seed = seed
        self._end = 10**digits

    def prompt(self, index: int) -> Prompt:
        source = random.Random(f"arithmetic {self._seed} {index}")
        left, right = source.randrange(self._end), source.randrange(self._end)
        return Prompt.of(f"{left}+{right}=", answer=str(left + right))

    async def verify(self, prompt: Prompt, answer: Turn) -> Verdict:
        success = float(answer.text == prompt.facts["answer"])
        return Verdict(success, {"success": success})
