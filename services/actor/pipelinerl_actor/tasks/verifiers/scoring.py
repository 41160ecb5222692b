"""The rubric of an environment as a verdict."""

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from pipelinerl_actor.task import Verdict
from pipelinerl_common.errors import TemporaryError

log = logging.getLogger(__name__)

_faults: ContextVar[list[Exception] | None] = ContextVar("faults", default=None)
"""What reward functions have raised in the scoring that is under way."""


async def score(environment: Any, state: Any) -> Verdict:
    """The weighted sum of its reward functions, and each of them as a metric.

    A function that raises counts as 0, as in `verifiers`, and in the metric `reward_errors`. Raises
    TemporaryError instead when it was the endpoint of a judge that did not answer: that says
    nothing about the policy.
    """
    faults: list[Exception] = []
    _faults.set(faults)
    await environment.rubric.score_group([state])
    for fault in faults:
        if _is_away(fault):
            raise TemporaryError(
                f"a reward function got no answer from its endpoint: {type(fault).__name__}: "
                f"{fault}"
            ) from fault
    return Verdict(state["reward"], {**state["metrics"], "reward_errors": len(faults)})


def rubrics_of(rubric: Any) -> Iterator[Any]:
    """`rubric`, and those that it is a group of."""
    yield rubric
    for each in getattr(rubric, "rubrics", ()):
        yield from rubrics_of(each)


def watch(rubric: Any) -> None:
    """From here on what the rubric's functions raise is noted; `verifiers` passes over it."""
    rubric.funcs[:] = [
        each if hasattr(each, "is_watched") else _watched(each) for each in rubric.funcs
    ]


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            value = function(*args, **kwargs)
            return float(await value if inspect.isawaitable(value) else value)
        except Exception as error:
            faults = _faults.get()
            if faults is not None:
                faults.append(error)
            log.debug("reward function %s: %s: %s", call.__name__, type(error).__name__, error)
            raise

    call.is_watched = True  # type: ignore[attr-defined]
    return call


def _is_away(error: Exception) -> bool:
    import httpx
    import openai

    return any(
        isinstance(each, openai.APIError | httpx.TransportError | ConnectionError)
        for each in causes(error)
    )


def causes(error: BaseException) -> Iterator[BaseException]:
    """`error`, what it was raised from, and so on."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
