"""Messages and completions, between the form of OpenAI's API, which environments speak, and ours."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipelinerl_actor.task import Message, Turn
from pipelinerl_actor.tools import calls_of, with_tools_told
from pipelinerl_common.errors import PermanentError
from pipelinerl_common.types import FinishReason


def plain(messages: Iterable[Any]) -> list[Message]:
    """As the chat template takes them: text only, a tool call as the text by which a policy makes
    it.

    Raises PermanentError for images, audio and what is no message.
    """
    return [_plain(each) for each in messages]


def _plain(message: Any) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PermanentError(f"the environment gave {message!r}, which is no message")
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(_text(part) for part in content)
    calls = [_call_text(each) for each in message.get("tool_calls") or ()]
    return {"role": message["role"], "content": "\n".join([content, *calls] if content else calls)}


def _text(part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text":
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise PermanentError(
        f"the environment gave a message with {kind!r} in it; only text can be trained on"
    )


def _call_text(call: Any) -> str:
    call = json.loads(call) if isinstance(call, str) else call
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return f"<tool_call>\n{json.dumps({'name': function['name'], 'arguments': arguments})}\n</tool_call>"


def with_tools_of(
    messages: Sequence[Message], tools: Iterable[Mapping[str, Any]] | None
) -> Sequence[Message]:
    """`messages`, with `tools` in the form of OpenAI's API told to the policy."""
    functions = [each["function"] for each in tools or ()]
    if not functions:
        return messages
    return with_tools_told(messages, [_described(each) for each in functions])


def _described(function: Mapping[str, Any]) -> str:
    description = f"{function['name']}: {function.get('description') or ''}".rstrip()
    return (
        f"{description} Arguments, as a JSON schema: {json.dumps(function.get('parameters') or {})}"
    )


def completion_of(turn: Turn, number: int) -> Any:
    """`turn` as if a model's endpoint had given it, with the tool calls that are in its text.
    `number` makes their ids.
    """
    from openai.types.chat import ChatCompletion

    calls = _calls(turn.text, number)
    content = turn.text[: turn.text.index("<tool_call>")] if calls else turn.text
    reason = (
        "length" if turn.finish_reason is FinishReason.LENGTH else "tool_calls" if calls else "stop"
    )
    message = {"role": "assistant", "content": content, "tool_calls": calls or None}
    return ChatCompletion.model_validate(
        {
            "id": f"turn-{number}",
            "object": "chat.completion",
            "created": 0,
            "model": "policy",
            "choices": [
                {"index": 0, "finish_reason": reason, "message": message, "logprobs": None}
            ],
        }
    )


def _calls(text: str, number: int) -> list[dict[str, Any]]:
    """None when one of them is not as it should be: then all of `text` is an answer."""
    calls = []
    for position, call in enumerate(calls_of(text)):
        if call is None:
            return []
        function = {"name": call.name, "arguments": json.dumps(call.arguments)}
        calls.append({"id": f"call-{number}-{position}", "type": "function", "function": function})
    return calls
