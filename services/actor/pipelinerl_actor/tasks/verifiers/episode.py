"""Drives one rollout of an environment with the policy's turns, and converts messages between the
form of OpenAI's API, which environments use, and ours.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from pipelinerl_actor.task import Message, Turn
from pipelinerl_actor.tools import calls_of, with_tool_descriptions
from pipelinerl_common.errors import PermanentError, TemporaryError
from pipelinerl_common.types import FinishReason


def plain(messages: Iterable[Any]) -> list[Message]:
    """The messages for the chat template: text only, with tool calls as the text of a policy.

    Raises PermanentError for images, audio and anything that is not a message.
    """
    return [_plain(each) for each in messages]


def _plain(message: Any) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PermanentError(f"the environment gave {message!r}, which is not a message")
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
    body = json.dumps({"name": function["name"], "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def with_tools_of(
    messages: Sequence[Message], tools: Iterable[Mapping[str, Any]] | None
) -> Sequence[Message]:
    """`messages` with `tools`, which are in the form of OpenAI's API, in the system message."""
    functions = [each["function"] for each in tools or ()]
    if not functions:
        return messages
    return with_tool_descriptions(messages, [_described(each) for each in functions])


def _described(function: Mapping[str, Any]) -> str:
    description = f"{function['name']}: {function.get('description') or ''}".rstrip()
    return (
        f"{description} Arguments, as a JSON schema: {json.dumps(function.get('parameters') or {})}"
    )


def completion_of(turn: Turn, number: int) -> Any:
    """`turn` as the completion of a model's endpoint, with the tool calls of its text; `number`
    makes their ids unique.
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
    """Empty when one of the calls is malformed: then all of `text` is an answer."""
    calls = []
    for position, call in enumerate(calls_of(text)):
        if call is None:
            return []
        function = {"name": call.name, "arguments": json.dumps(call.arguments)}
        calls.append({"id": f"call-{number}-{position}", "type": "function", "function": function})
    return calls


log = logging.getLogger(__name__)

CLEANUP_S = 30.0

AnswerFunction = Callable[[Sequence[Message]], Awaitable[Turn]]
"""Samples the policy's answer to the messages that are new since its last one."""


async def run_episode(environment: Any, row: Mapping[str, Any], answer: AnswerFunction) -> Any:
    """Runs a rollout to its end and returns its state, to be scored.

    Raises TemporaryError for a fault of the environment's infrastructure, PermanentError for a
    conversation that does not continue the previous one.
    """
    import verifiers

    state = await environment.init_state(dict(row), NO_CLIENT, "policy", {})
    try:
        state = await environment.setup_state(state)
        said: list[Message] = []
        while not await environment.is_completed(state):
            said = await _turn(environment, state, said, answer)
    except verifiers.Error as error:
        await _clean_up(environment, state)
        _give_up(error)
    except BaseException:
        await _clean_up(environment, state)
        raise
    await environment.render_completion(state)
    return state


async def _clean_up(environment: Any, state: Any) -> None:
    try:
        async with asyncio.timeout(CLEANUP_S):
            await environment._cleanup(state)
    except Exception as error:  # noqa: BLE001 - must not hide the error that ended the rollout
        log.warning(
            "the environment did not clean up after a rollout: %s: %s", type(error).__name__, error
        )


async def _turn(
    environment: Any, state: Any, said: list[Message], answer: AnswerFunction
) -> list[Message]:
    """Runs one turn and returns the whole conversation. `said` is the one before it, as a copy: an
    environment may change its messages in place.
    """
    import verifiers

    try:
        messages = await environment.get_prompt_messages(state)
        if state.get("final_env_response") is not None:
            return said
        given = plain(messages)
        if given[: len(said)] != said:
            raise PermanentError(
                "the environment changed what had been said before, so the tokens could not be "
                "kept as they were sampled"
            )
        new = given[len(said) :] if said else with_tools_of(given, state["oai_tools"])
        turn = await answer(new)
        await environment.add_model_response(
            state, messages, completion_of(turn, len(state["trajectory"]))
        )
    except verifiers.ToolError as error:
        # The policy's fault: it ends the rollout, which is scored.
        state["error"] = error
        return said
    return [*given, *plain(state["trajectory"][-1]["completion"])]


def _give_up(error: Exception) -> NoReturn:
    import verifiers

    reason = f"the environment: {type(error).__name__}: {error or error.__cause__}"
    if isinstance(error, verifiers.InfraError):
        raise TemporaryError(reason) from error
    raise PermanentError(reason) from error


class _NoClient:
    """Replaces the client of the policy's endpoint, which an environment must not use itself."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise PermanentError(
            f"the environment calls the policy's endpoint itself (client.{name}), so its tokens "
            "could not be trained on"
        )


NO_CLIENT = _NoClient()
