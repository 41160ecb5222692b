"""Environments of the package `verifiers` as tasks: their prompts, their replies, their rewards.

```
 rollout loop --samples--> turn --as a completion--> environment: stop conditions, tools,
      ^                                                   |          env_response
      +------------------- new messages ------------------+    at the end: its rubric -> Verdict
```
The environment never requests the policy's turns from a model: they are sampled by the rollout
loop, and their tokens are kept as they are. A task with one answer is judged in a verifier's
process, a task with several turns in the rollout loop.
"""

import asyncio
import json
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipelinerl_actor.dataset import Problems
from pipelinerl_actor.task import Message, Prompt, Rollout, Task, Turn, Verdict
from pipelinerl_actor.tasks.verifiers.environments import LoadedEnvironment, load, score
from pipelinerl_actor.tasks.verifiers.episode import plain, run_episode, with_tools_of
from pipelinerl_common.errors import PermanentError


class _EnvironmentTask(Task):
    """The prompts of an environment."""

    def __init__(self, loaded: LoadedEnvironment, order: Problems[int]) -> None:
        self._loaded = loaded
        self._order = order

    def prompt(self, index: int) -> Prompt:
        row = self._loaded.rows[self._order[index]]
        tools = _tools(self._loaded.environment_of(row), row)
        return Prompt(tuple(with_tools_of(plain(row["prompt"]), tools)), {"row": row})


class SingleTurn(_EnvironmentTask):
    """A task with one answer, judged in the main thread of a verifier's process, where reward
    functions may compute, and set alarms.
    """

    def __init__(self, loaded: LoadedEnvironment, order: Problems[int]) -> None:
        super().__init__(loaded, order)
        self._loop: asyncio.AbstractEventLoop | None = None

    def verify(self, prompt: Prompt, answer: Turn) -> Verdict:
        # One loop for all verdicts: the clients of judges are bound to the loop of their first use.
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            weakref.finalize(self, self._loop.close)
        return self._loop.run_until_complete(self._judge(prompt.facts["row"], answer))

    async def _judge(self, row: Mapping[str, Any], answer: Turn) -> Verdict:
        async def given(messages: Sequence[Message]) -> Turn:
            del messages
            return answer

        environment = self._loaded.environment_of(row)
        return await score(environment, await run_episode(environment, row, given))


@dataclass(frozen=True, slots=True)
class LastTurn(Turn):
    """The last turn of a rollout, with the environment's state at its end."""

    state: Any = None


class MultiTurn(_EnvironmentTask):
    """A task with several turns, driven and judged in the rollout loop."""

    async def rollout(self, rollout: Rollout) -> Verdict:
        row = rollout.prompt.facts["row"]
        state = await run_episode(self._loaded.environment_of(row), row, rollout.chat)
        if not rollout.turns:
            raise PermanentError("the environment ended before the policy's first turn")
        last = rollout.turns[-1]
        return await rollout.verify(
            LastTurn(
                last.text,
                last.token_ids,
                last.logprobs,
                last.version_runs,
                last.finish_reason,
                state,
            )
        )

    async def verify(self, prompt: Prompt, answer: Turn) -> Verdict:
        assert isinstance(answer, LastTurn)
        return await score(self._loaded.environment_of(prompt.facts["row"]), answer.state)


def _tools(environment: Any, row: Mapping[str, Any]) -> Any:
    """The tools of `row`, or the environment's if it has none of its own."""
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
    """A task of the environment that `verifiers` loads as `name` with `arguments`, on its data set
    `split`.

    Raises SettingsError when it cannot be made, or is of an unsupported kind.
    """
    loaded = load(name, arguments or {}, split, seed)
    order = Problems(range(len(loaded.rows)), None, 0, seed)
    return SingleTurn(loaded, order) if loaded.is_single_turn else MultiTurn(loaded, order)
