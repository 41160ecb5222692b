"""Tasks in which the policy calls tools over several turns.

    class WithCalculator(ToolTask):
        tools = (Tool("add", 'Adds two numbers: {"a": 1, "b": 2}.', add),)

The policy calls a tool by writing

    <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>

the form that Hermes and Qwen models are trained on. The result follows as a message of the role
"tool". A turn without a call is the answer, which `verify` judges.
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
    """A tool for the policy. `call` takes the arguments as keywords. The policy receives its errors
    as the result, except that a TemporaryError retries the trajectory.
    """

    name: str
    description: str
    """Text for the policy: what the tool does, and its arguments by example."""
    call: Callable[..., Awaitable[str]]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool by the policy."""

    name: str
    arguments: Any
    """Mostly a mapping, but any JSON that the policy wrote."""


def calls_of(text: str) -> list[ToolCall | None]:
    """The calls in a turn's text, in order; None for a malformed one."""
    return [_parsed(body) for body in _CALL.findall(text)]


def _parsed(body: str) -> ToolCall | None:
    try:
        call = json.loads(body)
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return ToolCall(name, arguments) if isinstance(name, str) else None


class ToolTask(Task, ABC):
    """A task with tools. Subclasses define `prompt`, `verify`, and `tools`."""

    tools: Sequence[Tool] = ()
    max_turns: int = 8
    """Most turns that the policy may sample; the last one is judged, with a call in it or not."""
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
        """The result for the policy, and whether the tool succeeded."""
        if call is None:
            return 'error: a call is {"name": ..., "arguments": {...}}', False
        name, arguments = call.name, call.arguments
        tool = next((each for each in self.tools if each.name == name), None)
        if tool is None or not isinstance(arguments, dict):
            names = ", ".join(tool.name for tool in self.tools)
            return f"error: there is no tool {name!r} with such arguments; there is {names}", False
        try:
            async with asyncio.timeout(self.tool_timeout_s):
                return (await tool.call(**arguments))[:_MAX_RESULT_CHARACTERS], True
        except TemporaryError:
            raise
        except TimeoutError:
            return f"error: {name} took longer than {self.tool_timeout_s:g} s", False
        except Exception as error:  # noqa: BLE001 - the tool's fault or the policy's
            return f"error: {type(error).__name__}: {error}"[:_MAX_RESULT_CHARACTERS], False


def with_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> Sequence[Message]:
    """`messages` with the tools listed in the system message, which is made when there is none."""
    return with_tool_descriptions(messages, [f"{tool.name}: {tool.description}" for tool in tools])


def with_tool_descriptions(
    messages: Sequence[Message], descriptions: Sequence[str]
) -> Sequence[Message]:
    """Like `with_tools`; each description begins with the tool's name."""
    listed = "\n".join(f"- {each}" for each in descriptions)
    form = '<tool_call>{"name": ..., "arguments": {...}}</tool_call>'
    listing = f"You may call these tools by writing {form}, then wait for the result:\n{listed}"
    if messages and messages[0]["role"] == "system":
        return [
            {"role": "system", "content": f"{messages[0]['content']}\n\n{listing}"},
            *messages[1:],
        ]
    return [{"role": "system", "content": listing}, *messages]
