"""Tasks in which the policy calls tools over several turns.

    class WithCalculator(ToolTask):
        tools = (Tool("add", 'Adds two numbers: {"a": 1, "b": 2}.', add),)

The policy calls a tool by writing `<tool_call>{"name": "add", "arguments": {"a": 1, "b":
2}}</tool_call>`, the form that Hermes and Qwen models are trained on. Its result follows as a
message of the role "tool". A turn without a call is the answer, which
`verify` judges.
"""

import asyncio
import json
import re
from abc import ABC
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipelinerl_actor.task import Message, Rollout, Task, Verdict
from pipelinerl_common.errors import TemporaryError
from pipelinerl_common.types import FinishReason

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_MAX_RESULT_CHARACTERS = 4000


@dataclass(frozen=True, slots=True)
class Tool:
    """`call` takes the arguments as keywords. What it raises is told to the policy; TemporaryError
    retries the trajectory.
    """

    name: str
    description: str
    """For the policy: what it does, and its arguments by example."""
    call: Callable[..., Awaitable[str]]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Of a tool, by the policy."""

    name: str
    arguments: Any
    """Mostly a mapping; whatever JSON the policy wrote."""


def calls_of(text: str) -> list[ToolCall | None]:
    """The calls in a turn's text, in order; None for one that is not of the form."""
    return [_parsed(body) for body in _CALL.findall(text)]


def _parsed(body: str) -> ToolCall | None:
    try:
        call = json.loads(body)
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return ToolCall(name, arguments) if isinstance(name, str) else None


class ToolTask(Task, ABC):
    """Override `prompt`, `verify`, and `tools`."""

    tools: Sequence[Tool] = ()
    max_turns: int = 8
    """Answers that the policy may sample; the last is the one that is judged, with a call in it or
    not.
    """
    tool_timeout_s: float = 30.0

    async def rollout(self, rollout: Rollout) -> Verdict:
        messages: Sequence[Message] = with_tools(rollout.prompt.messages, self.tools)
        num_calls = num_failed = 0
        for turns_left in range(self.max_turns - 1, -1, -1):
            turn = await rollout.chat(messages)
            calls = calls_of(turn.text)
            if not calls or turns_left == 0 or turn.finish_reason is FinishReason.LENGTH:
                break
            outcomes = [await self._call(call) for call in calls]
            num_calls += len(outcomes)
            num_failed += sum(not is_good for _, is_good in outcomes)
            messages = [{"role": "tool", "content": text} for text, _ in outcomes]
        verdict = await rollout.verify(turn)
        counts = {
            "turns": float(len(rollout.turns)),
            "tool_calls": float(num_calls),
            "tool_failures": float(num_failed),
        }
        return replace(verdict, metrics={**counts, **verdict.metrics})

    async def _call(self, call: ToolCall | None) -> tuple[str, bool]:
        """What the policy is told, and whether the tool did its work."""
        if call is None:
            return 'error: a call is {"name": ..., "arguments": {...}}', False
        name, arguments = call.name, call.arguments
        tool = next((each for each in self.tools if each.name == name), None)
        if tool is None or not isinstance(arguments, dict):
            return (
                f"error: there is no tool {name!r} with such arguments; there is "
                f"{_names(self.tools)}",
                False,
            )
        try:
            async with asyncio.timeout(self.tool_timeout_s):
                return (await tool.call(**arguments))[:_MAX_RESULT_CHARACTERS], True
        except TemporaryError:
            raise
        except TimeoutError:
            return f"error: {name} took longer than {self.tool_timeout_s:g} s", False
        except Exception as error:  # noqa: BLE001 - the tool's fault or the policy's: either way the policy reads about it
            return f"error: {type(error).__name__}: {error}"[:_MAX_RESULT_CHARACTERS], False


def with_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> Sequence[Message]:
    """`messages` with the tools told in the system message, which is made when there is none."""
    return with_tools_told(messages, [f"{tool.name}: {tool.description}" for tool in tools])


def with_tools_told(messages: Sequence[Message], descriptions: Sequence[str]) -> Sequence[Message]:
    """As `with_tools`; each description begins with the tool's name."""
    listed = "\n".join(f"- {each}" for each in descriptions)
    form = '<tool_call>{"name": ..., "arguments": {...}}</tool_call>'
    told = f"You may call these tools by writing {form}, then wait for the result:\n{listed}"
    if messages and messages[0]["role"] == "system":
        return [{"role": "system", "content": f"{messages[0]['content']}\n\n{told}"}, *messages[1:]]
    return [{"role": "system", "content": told}, *messages]


def _names(tools: Sequence[Tool]) -> str:
    return ", ".join(tool.name for tool in tools)
