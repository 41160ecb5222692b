"""A generator as the rollout loop uses it: turns for a trajectory, readiness, and load."""

import asyncio
import math
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
from pydantic import ValidationError

from pipelinerl.v1.admission_pb2 import GeneratorLoad
from pipelinerl_actor.rollout.failures import GivenUp
from pipelinerl_actor.task import Message, Turn
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.generator_api import Choice, CompletionRequest, CompletionResponse
from pipelinerl_common.generator_client import (
    BadAnswer,
    GeneratorClient,
    GeneratorError,
    GeneratorRefused,
)
from pipelinerl_common.service import cancel_all
from pipelinerl_common.settings import SamplingSettings
from pipelinerl_common.types import FinishReason, VersionRun

_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_CANCEL_AGAIN_S = 0.25
_CANCEL_S = 10.0
_READY_S = 2.0


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A request for `n` turns that continue either `messages` or `prompt_token_ids`."""

    sampling: SamplingSettings
    messages: Sequence[Message] | None = None
    prompt_token_ids: Sequence[int] | None = None
    n: int = 1
    answer_token_ids: Sequence[int] = ()
    """The answer's first tokens, sampled before; goes with `prompt_token_ids` and n=1."""
    stop: asyncio.Event | None = None
    """Once it is set, the answer comes at once, with what was sampled."""

    def to_api(self, request_id: str | None = None) -> CompletionRequest:
        """Raises GivenUp for what the generator would refuse as invalid."""
        fields: dict[str, Any] = {
            "messages": self.messages,
            "prompt_token_ids": self.prompt_token_ids,
            "n": self.n,
            "max_tokens": self.sampling.max_tokens - len(self.answer_token_ids),
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "top_k": self.sampling.top_k,
            "stop": self.sampling.stop or None,
            "answer_token_ids": self.answer_token_ids or None,
            "request_id": request_id,
        }
        try:
            return CompletionRequest(**fields)
        except ValidationError as error:
            raise GivenUp("http_422", f"not a completion request: {error}") from error


@dataclass(frozen=True, slots=True)
class Completions:
    """The answer: `prompt_token_ids` as the generator saw them, and `n` turns that share them."""

    prompt_token_ids: tuple[int, ...]
    turns: tuple[Turn, ...]
    complete: tuple[bool, ...] = ()
    """Whether each turn has ended by itself; otherwise the request was stopped."""


class RolloutClient:
    """The rollout loop's client of the generator at `url`, for example "http://127.0.0.1:8000"."""

    def __init__(self, url: str, session: aiohttp.ClientSession, token: str | None) -> None:
        self._client = GeneratorClient(url, token, session)
        self.url = self._client.url

    async def complete(self, request: TurnRequest) -> Completions:
        """Raises GeneratorUnavailable (worth a retry; GeneratorAway says when), GivenUp (never for
        this prompt), SettingsError (token refused).

        Has no deadline of its own: the trajectory's is around it.
        """
        if request.stop is None:
            return _completions(await self._complete(request.to_api()), request.n, self.url)
        request_id = uuid.uuid4().hex
        answering = asyncio.ensure_future(self._complete(request.to_api(request_id)))
        stopping = asyncio.ensure_future(self._cancel_on(request.stop, request_id))
        try:
            answer = await answering
        finally:
            await cancel_all([answering, stopping])
        return _completions(answer, request.n, self.url, may_be_stopped=request.stop.is_set())

    async def _complete(self, request: CompletionRequest) -> CompletionResponse:
        try:
            return await self._client.complete(request, timeout_s=None)
        except BadAnswer as error:
            raise GivenUp("bad_response", str(error)) from error
        except GeneratorRefused as error:
            if error.status in (401, 403):
                raise SettingsError(
                    f"{error}; the actor's --token-file must hold the token of the job's generators"
                ) from error
            raise GivenUp(f"http_{error.status}", str(error)) from error

    async def _cancel_on(self, stop: asyncio.Event, request_id: str) -> None:
        """Cancels the request once `stop` is set, again and again until this is cancelled."""
        await stop.wait()
        while True:
            # Repeated, because the generator may not have received the request yet. A failure of
            # the cancel is no news: the caller waits for the answer, or for its own failure.
            with suppress(GeneratorError):
                await self._client.cancel(request_id, _CANCEL_S)
            await asyncio.sleep(_CANCEL_AGAIN_S)

    async def serves(self) -> bool:
        """Whether the generator has the job's weights and accepts requests."""
        return await self._client.is_ready(_READY_S)

    async def load(self, timeout_s: float) -> GeneratorLoad:
        """The generator's load. Raises GeneratorError."""
        load = await self._client.load(timeout_s)
        try:
            return GeneratorLoad(generator=self.url, **load.model_dump())
        except ValueError as error:  # a number out of its field's range
            raise BadAnswer(f"{self.url}/load: not a load: {error}", 200) from error


def _completions(
    answer: CompletionResponse, n: int, url: str, *, may_be_stopped: bool = False
) -> Completions:
    """The checked answer. Raises GivenUp with the reason "bad_response" when its numbers do not
    belong together.
    """
    choices = sorted(answer.choices, key=lambda choice: choice.index)
    complete = tuple(not (may_be_stopped and choice.finish_reason == "abort") for choice in choices)
    try:
        turns = tuple(map(_turn, choices, complete))
    except (ValueError, KeyError) as error:
        raise GivenUp("bad_response", f"{url}: not a completion: {error!r}") from error
    prompt_token_ids = tuple(answer.prompt_token_ids)
    if len(turns) != n or not prompt_token_ids:
        raise GivenUp(
            "bad_response",
            f"{url}: {len(turns)} choices of {n}, {len(prompt_token_ids)} prompt token ids",
        )
    return Completions(prompt_token_ids, turns, complete)


def _turn(choice: Choice, is_complete: bool) -> Turn:
    runs = tuple(
        VersionRun(version, num_tokens)
        for version, num_tokens in choice.weight_versions
        if num_tokens
    )
    num_ids, num_logprobs = len(choice.token_ids), len(choice.token_logprobs)
    in_runs = sum(run.num_tokens for run in runs)
    # Checked here, since a wrong token would only show as a wrong gradient.
    if not num_ids == num_logprobs == in_runs:
        raise ValueError(
            f"{num_ids} token ids, {num_logprobs} log-probabilities, version runs over "
            f"{in_runs} tokens"
        )
    if any(run.policy_version < 0 or run.num_tokens < 0 for run in runs):
        raise ValueError(f"weight_versions={choice.weight_versions} before the job's first weights")
    if not all(map(math.isfinite, choice.token_logprobs)):
        raise ValueError("a log-probability is not finite")
    reason = _FINISH_REASONS[choice.finish_reason] if is_complete else FinishReason.LENGTH
    return Turn(
        choice.message.content or "",
        tuple(choice.token_ids),
        tuple(choice.token_logprobs),
        runs,
        reason,
    )
