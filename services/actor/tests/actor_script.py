"""A Rollout without a generator."""

from collections.abc import Sequence

from pipelinerl_actor.task import Message, Task, Turn, Verdict
from pipelinerl_common.types import FinishReason


class Script:
    """A Rollout whose policy says `says` in turn."""

    def __init__(
        self,
        task: Task,
        says: Sequence[str],
        finish_reason: FinishReason = FinishReason.STOP,
        index: int = 0,
    ) -> None:
        self.prompt_index, self.sample_index, self.seed = index, 0, 0
        self.prompt = task.prompt(index)
        self.turns: list[Turn] = []
        self.heard: list[Message] = []
        self._task = task
        self._says = list(says)
        self._finish_reason = finish_reason

    async def chat(self, messages: Sequence[Message]) -> Turn:
        self.heard += messages
        self.turns.append(Turn(self._says[len(self.turns)], (), (), (), self._finish_reason))
        return self.turns[-1]

    async def complete(self, token_ids: Sequence[int]) -> Turn:
        raise NotImplementedError

    async def verify(self, turn: Turn) -> Verdict:
        outcome = self._task.verify(self.prompt, turn)
        return outcome if isinstance(outcome, Verdict) else await outcome
