"""Loads environments of the package `verifiers` by name, refuses unsupported ones, and turns the
scores of their rubrics into verdicts.
"""

import functools
import inspect
import logging
import random
import signal
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelinerl_actor.task import Verdict
from pipelinerl_common.errors import SettingsError, TemporaryError

log = logging.getLogger(__name__)

_faults: ContextVar[list[Exception] | None] = ContextVar("faults", default=None)
"""Errors of reward functions in the present scoring."""


async def score(environment: Any, state: Any) -> Verdict:
    """The weighted sum of the environment's reward functions, and each of them as a metric.

    A function that raises counts as 0, as in `verifiers`, and in the metric `reward_errors`. Raises
    TemporaryError when the endpoint of a judge did not answer, since that is no fault of the
    policy.
    """
    faults: list[Exception] = []
    _faults.set(faults)
    await environment.rubric.score_group([state])
    for fault in faults:
        if _is_unreachable(fault):
            raise TemporaryError(
                f"a reward function got no answer from its endpoint: {type(fault).__name__}: "
                f"{fault}"
            ) from fault
    return Verdict(state["reward"], {**state["metrics"], "reward_errors": len(faults)})


def rubrics_of(rubric: Any) -> Iterator[Any]:
    """`rubric` and, for a group, all its members."""
    yield rubric
    for each in getattr(rubric, "rubrics", ()):
        yield from rubrics_of(each)


def watch(rubric: Any) -> None:
    """Records the errors of the rubric's functions from now on, which `verifiers` ignores."""
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


def _is_unreachable(error: Exception) -> bool:
    import httpx
    import openai

    return any(
        isinstance(each, openai.APIError | httpx.TransportError | ConnectionError)
        for each in causes(error)
    )


def causes(error: BaseException) -> Iterator[BaseException]:
    """`error` and the chain of its causes."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)


WHERE = "spec.task.args"


@dataclass(frozen=True, slots=True)
class LoadedEnvironment:
    """An environment and the rows of one of its data sets."""

    environment: Any
    """A MultiTurnEnv, or a group of them."""
    rows: Sequence[Mapping[str, Any]]
    """Each has prompt, example_id and task, and mostly answer and info."""
    is_single_turn: bool
    """Whether every rollout has one answer only, which can be judged by itself."""

    def environment_of(self, row: Mapping[str, Any]) -> Any:
        """The environment of `row`: in a group each row names its own."""
        import verifiers

        environment = self.environment
        while isinstance(environment, verifiers.EnvGroup):
            environment = environment.get_env_for_task(row["task"])
        return environment


def load(name: str, arguments: dict[str, Any], split: str, seed: int) -> LoadedEnvironment:
    """Loads an environment, whose random draws then follow from `seed`. Raises SettingsError."""
    try:
        import verifiers
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"{WHERE}.name={name!r} needs the package {error.name!r}: pip install "
            "'pipelinerl[verifiers]'"
        ) from error
    with _signals_kept(), _seeded(f"verifiers {seed}"):
        try:
            environment = verifiers.load_environment(name, **arguments)
            rows = environment.get_dataset() if split == "train" else environment.get_eval_dataset()
        except Exception as error:
            raise SettingsError(_reason(name, arguments, split, error)) from error
    players = list(_players(environment))
    for each in players:
        _check(name, each)
        for rubric in rubrics_of(each.rubric):
            watch(rubric)
    if not len(rows):
        raise SettingsError(f"{WHERE}.name={name!r}: its data set is empty")
    if not isinstance(prompt := rows[0]["prompt"], list):
        raise SettingsError(
            f"{WHERE}.name={name!r}: a prompt is {prompt!r}, not a list of messages"
        )
    return LoadedEnvironment(
        environment, rows, all(type(each) is verifiers.SingleTurnEnv for each in players)
    )


def _players(environment: Any) -> Iterator[Any]:
    import verifiers

    if isinstance(environment, verifiers.EnvGroup):
        for each in environment.envs:
            yield from _players(each)
    else:
        yield environment


def _check(name: str, environment: Any) -> None:
    import verifiers

    kind = type(environment)
    where = f"{WHERE}.name={name!r}: {kind.__name__}"
    if (
        not isinstance(environment, verifiers.MultiTurnEnv)
        or kind.rollout is not verifiers.MultiTurnEnv.rollout
    ):
        raise SettingsError(
            f"{where} has a rollout of its own; only those of SingleTurnEnv and MultiTurnEnv are "
            "supported"
        )
    if kind.get_model_response is not verifiers.Environment.get_model_response:
        raise SettingsError(
            f"{where} asks for the policy's answers in its own way, so their tokens could not be "
            "kept"
        )
    if environment.message_type != "chat":
        raise SettingsError(
            f"{where} has message_type={environment.message_type!r}; only 'chat' is supported"
        )
    for rubric in rubrics_of(environment.rubric):
        grouped = rubric._get_group_reward_funcs()
        if grouped:
            raise SettingsError(
                f"{where}: the reward function {grouped[0].__name__!r} compares the rollouts of a "
                "group; here each is judged by itself"
            )


def _reason(name: str, arguments: Mapping[str, Any], split: str, error: Exception) -> str:
    """The fault and its remedy, by the first cause: `verifiers` wraps errors in its own."""
    import httpx
    import openai

    where, chain = f"{WHERE}.name={name!r}", list(causes(error))
    module = name.replace("-", "_").split("/")[-1]
    first = chain[-1]
    for each in chain:
        if isinstance(each, ModuleNotFoundError):
            if each.name == module:
                remedy = "install the environment's package, or put its folder on PYTHONPATH"
                return f"{where}: there is no module {module!r}; {remedy}"
            return f"{where}: {module} imports {each.name!r}, which is not installed"
        if isinstance(each, openai.OpenAIError):
            return (
                f"{where}: it has a model as judge, but no endpoint for it: set OPENAI_API_KEY, "
                "and OPENAI_BASE_URL, of the rollout container, or name one in "
                f"{WHERE}.arguments ({each})"
            )
        if isinstance(each, OSError | httpx.HTTPError):
            return (
                f"{where} needs the network or a file that cannot be reached: "
                f"{type(each).__name__}: {each}"
            )
    if str(first) == "dataset is not set":
        return (
            f"{where} has no data set for {WHERE}.split={split!r}; it may have one for the "
            "other of 'train' and 'eval'"
        )
    return f"{where} with {WHERE}.arguments={dict(arguments)}: {type(first).__name__}: {first}"


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Restores the handlers of SIGINT and SIGTERM, which an environment replaces when made."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@contextmanager
def _seeded(seed: str) -> Iterator[None]:
    """Seeds the block: the verifier's process makes its own environment, with the same rows."""
    before, numpy_before = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(zlib.crc32(seed.encode()))
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)
