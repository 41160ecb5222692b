"""One rollout of an environment, with the policy's turns from elsewhere."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NoReturn

from pipelinerl_actor.task import Message, Turn
from pipelinerl_actor.tasks.verifiers.messages import completion_of, plain, with_tools_of
from pipelinerl_common.errors import PermanentError, TemporaryError

log = logging.getLogger(__name__)

CLEANUP_S = 30.0

Answer = Callable[[Sequence[Message]], Awaitable[Turn]]
"""Takes the messages that are new since its last answer."""


async def play(environment: Any, row: Mapping[str, Any], answer: Answer) -> Any:
    """The state of a rollout that is over, to be scored.

    Raises TemporaryError for what the environment calls a fault of its infrastructure,
    PermanentError for a conversation that does not go on from where it was.
    """
    state = await environment.init_state(dict(row), NO_CLIENT, "policy", {})
    try:
        state = await _prepared(environment, state)
        said: list[Message] = []
        while not await environment.is_completed(state):
            said = await _turn(environment, state, said, answer)
    except BaseException:
        await _clean_up(environment, state)
        raise
    await environment.render_completion(state)
    return state


async def _clean_up(environment: Any, state: Any) -> None:
    """What ended the rollout is told to others; here it is only that nothing is left of it."""
    try:
        async with asyncio.timeout(CLEANUP_S):
            await environment._cleanup(state)
    except Exception as error:  # noqa: BLE001 - the environment's own code, and the rollout is lost already
        log.warning(
            "the environment did not clean up after a rollout: %s: %s", type(error).__name__, error
        )


async def _prepared(environment: Any, state: Any) -> Any:
    import verifiers

    try:
        return await environment.setup_state(state)
    except verifiers.Error as error:
        _give_up(error)


async def _turn(environment: Any, state: Any, said: list[Message], answer: Answer) -> list[Message]:
    """Everything that has been said after one more turn. `said` is what was before, in words of our
    own: an environment may change its messages in place.
    """
    import verifiers

    try:
        messages = await environment.get_prompt_messages(state)
        if state.get("final_env_response") is not None:
            return said
        told = plain(messages)
        if told[: len(said)] != said:
            raise PermanentError(
                "the environment changed what had been said before, so the tokens could not be "
                "kept as they were sampled"
            )
        turn = await answer(told[len(said) :] if said else with_tools_of(told, state["oai_tools"]))
        await environment.add_model_response(
            state, messages, completion_of(turn, len(state["trajectory"]))
        )
    except verifiers.ToolError as error:  # the policy's doing; it ends the rollout, which is scored
        state["error"] = error
        return said
    except verifiers.Error as error:
        _give_up(error)
    return [*told, *plain(state["trajectory"][-1]["completion"])]


def _give_up(error: Exception) -> NoReturn:
    import verifiers

    reason = f"the environment: {type(error).__name__}: {error or error.__cause__}"
    if isinstance(error, verifiers.InfraError):
        raise TemporaryError(reason) from error
    raise PermanentError(reason) from error


class _NoClient:
    """Stands where an environment finds the endpoint of the policy's model."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise PermanentError(
            f"the environment asks the policy's endpoint by itself (client.{name}), which cannot "
            "be trained on"
        )


NO_CLIENT = _NoClient()
