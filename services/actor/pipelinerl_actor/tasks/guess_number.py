"""A multi-turn example: guess a hidden number; the environment answers "higher" or "lower"."""

import random

from pipelinerl_actor.task import Message, Prompt, Rollout, Task, Verdict
from pipelinerl_common.errors import SettingsError


class GuessNumber(Task):
    """The reward of a right guess falls linearly from 1 at the first turn to 1/`max_turns` at the
    last; it is 0 without one.
    """

    def __init__(self, *, seed: int, highest: int = 9, max_turns: int = 4) -> None:
        if highest < 1 or max_turns < 1:
            raise SettingsError(
                f"spec.task.args: highest={highest} and max_turns={max_turns} must be at least 1"
            )
        self._seed = seed
        self._highest = highest
        self._max_turns = max_turns

    def prompt(self, index: int) -> Prompt:
        number = random.Random(f"guess {self._seed} {index}").randint(0, self._highest)
        return Prompt.of(
            f"Guess my number, 0 to {self._highest}. Answer with the number only.", number=number
        )

    async def rollout(self, rollout: Rollout) -> Verdict:
        number: int = rollout.prompt.facts["number"]
        messages: tuple[Message, ...] = rollout.prompt.messages
        for turn_index in range(self._max_turns):
            turn = await rollout.chat(messages)
            guess = turn.text.strip()
            if guess == str(number):
                reward = 1 - turn_index / self._max_turns
                return Verdict(reward, {"success": 1.0, "turns": turn_index + 1})
            hint = "not a number"
            if guess.isdecimal():
                hint = "higher" if int(guess) < number else "lower"
            messages = ({"role": "user", "content": hint},)
        return Verdict(0.0, {"success": 0.0, "turns": self._max_turns})
