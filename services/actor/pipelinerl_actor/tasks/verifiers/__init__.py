"""The two kinds of tasks: one answer, judged in a process, and several turns, played and judged in
the rollout loop.

Any environment of the package `verifiers`: its prompts, its answers to the policy, its rewards.

```
 rollout loop --samples--> turn --as a completion--> environment: stop conditions, tools, env_response
      ^                                                   |
      +------------- the messages that are new -----------+        in the end: its rubric -> Verdict
```
The environment never asks a model for the policy's turns: they are sampled here, and their tokens
are kept as they were.
"""

import asyncio
import json
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipelinerl_actor.dataset import Problems
from pipelinerl_actor.task import Message, Prompt, Rollout, Task, Turn, Verdict
from pipelinerl_actor.tasks.verifiers.environments import Loaded, load, score
from pipelinerl_actor.tasks.verifiers.episode import plain, play, with_tools_of
from pipelinerl_common.errors import PermanentError


class _OfEnvironment(Task):
    def __init__(self, loaded: Loaded, order: Problems[int]) -> None:
        self._loaded = loaded
        self._order = order

    def prompt(self, index: int) -> Prompt:
        row = self._loaded.rows[self._order[index]]
        tools = _tools(self._loaded.environment_of(row), row)
        return Prompt(tuple(with_tools_of(plain(row["prompt"]), tools)), {"row": row})


class SingleTurn(_OfEnvironment):
    """Judged in a verifier's process, in its main thread, where reward functions may compute, and
    set alarms.
    """

    def __init__(self, loaded: Loaded, order: Problems[int]) -> None:
        super().__init__(loaded, order)
        self._loop: asyncio.AbstractEventLoop | None = None

    def verify(self, prompt: Prompt, answer: Turn) -> Verdict:
        if (
            self._loop is None
        ):  # one for all verdicts, since clients of judges keep to the loop that they began in
            self._loop = asyncio.new_event_loop()
            weakref.finalize(self, self._loop.close)
        return self._loop.run_until_complete(self._judge(prompt.facts["row"], answer))

    async def _judge(self, row: Mapping[str, Any], answer: Turn) -> Verdict:
        async def given(messages: Sequence[Message]) -> Turn:
            del messages
            return answer

        environment = self._loaded.environment_of(row)
        return await score(environment, await play(environment, row, given))


@dataclass(frozen=True, slots=True)
class Played(Turn):
    """The last turn of a rollout, with the environment's state at its end."""

    state: Any = None


class MultiTurn(_OfEnvironment):
    """Played and judged in the rollout loop."""

    async def rollout(self, rollout: Rollout) -> Verdict:
        row = rollout.prompt.facts["row"]
        state = await play(self._loaded.environment_of(row), row, rollout.chat)
        if not rollout.turns:
            raise PermanentError("the environment ended before the policy's first turn")
        last = rollout.turns[-1]
        return await rollout.verify(
            Played(
                last.text,
                last.token_ids,
                last.logprobs,
                last.version_runs,
                last.finish_reason,
                state,
            )
        )

    async def verify(self, prompt: Prompt, answer: Turn) -> Verdict:
        assert isinstance(answer, Played)
        return await score(self._loaded.environment_of(prompt.facts["row"]), answer.state)


def _tools(environment: Any, row: Mapping[str, Any]) -> Any:
    """A row may bring its own, in place of the environment's."""
    info = row.get("info")
    info = json.loads(info) if isinstance(info, str) and info else info
    own = info.get("oai_tools") if isinstance(info, Mapping) else None
    return environment.oai_tools if own is None else own


def environment(
    *,
    seed: int,
    name: str,
    arguments: dict[str, Any] | None = None,
    split: Literal["train", "eval"] = "train",
) -> Task:
    """The environment that `verifiers` knows as `name`, made with `arguments`; `split` is which of
    its data sets to take.

    Raises SettingsError when it cannot be made, or is of a kind that cannot be played here.
    """
    loaded = load(name, arguments or {}, split, seed)
    order = Problems(range(len(loaded.rows)), None, 0, seed)
    return SingleTurn(loaded, order) if loaded.is_single_turn else MultiTurn(loaded, order)
