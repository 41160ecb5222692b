"""The generator's completions over HTTP: one generator, JSON in and out, its statuses as our
errors.
"""

import asyncio
import json
import math
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from pipelinerl.v1.admission_pb2 import GeneratorLoad
from pipelinerl_actor.rollout.failures import GivenUp
from pipelinerl_actor.task import Message, Turn
from pipelinerl_common import tracing
from pipelinerl_common.errors import PipelineRLError, SettingsError, TemporaryError, Unavailable
from pipelinerl_common.service import cancel_all
from pipelinerl_common.settings import SamplingSettings
from pipelinerl_common.types import FinishReason, VersionRun

_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_MAX_ERROR_CHARACTERS = 500
_DEFAULT_RETRY_AFTER_S = 0.5
_CANCEL_AGAIN_S = 0.25
_READY_S = 2.0


class GeneratorAway(Unavailable):
    """The generator is not there or serves nothing yet; `retry_after_s` is when to ask again."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ConnectionLost(TemporaryError):
    """The connection broke while the generator was at it: a failed try, since the request itself
    may be the cause.
    """


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """`n` completions of either `messages` or `prompt_token_ids`."""

    sampling: SamplingSettings
    messages: Sequence[Message] | None = None
    prompt_token_ids: Sequence[int] | None = None
    n: int = 1
    answer_token_ids: Sequence[int] = ()
    """The answer's first tokens, sampled before; goes with `prompt_token_ids` and n=1."""
    stop: asyncio.Event | None = None
    """Once it is set, the answer comes at once, with what was sampled."""

    def to_json(self) -> dict[str, Any]:
        prompt: dict[str, Any] = (
            {"messages": list(self.messages)}
            if self.messages is not None
            else {"prompt_token_ids": self.prompt_token_ids}
        )
        body: dict[str, Any] = {
            **prompt,
            "n": self.n,
            "max_tokens": self.sampling.max_tokens - len(self.answer_token_ids),
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "top_k": self.sampling.top_k,
        }
        if self.sampling.stop:
            body["stop"] = self.sampling.stop
        if self.answer_token_ids:
            body["answer_token_ids"] = self.answer_token_ids
        return body


@dataclass(frozen=True, slots=True)
class Completions:
    """The answer: `prompt_token_ids` as the generator saw them, and `n` turns that share them."""

    prompt_token_ids: tuple[int, ...]
    turns: tuple[Turn, ...]
    complete: tuple[bool, ...] = ()
    """Whether each turn has ended by itself; otherwise the request was stopped."""


class GeneratorClient:
    """One generator at `url`, for example "http://127.0.0.1:8000". Closing the request is what
    stops its decoding.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, token: str | None) -> None:
        self.url = url.rstrip("/")
        self._session = session
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def complete(self, request: CompletionRequest) -> Completions:
        """Raises GeneratorAway, TemporaryError (worth a retry), GivenUp (never for this prompt),
        SettingsError (token refused).

        Has no deadline of its own: the trajectory's is around it.
        """
        if request.stop is None:
            return parse_completions(
                await self._post("/v1/chat/completions", request.to_json()), request.n, self.url
            )
        request_id = uuid.uuid4().hex
        answering = asyncio.ensure_future(
            self._post("/v1/chat/completions", {**request.to_json(), "request_id": request_id})
        )
        stopping = asyncio.ensure_future(self._stop(request.stop, request_id))
        try:
            body = await answering
        finally:
            await cancel_all([answering, stopping])
        return parse_completions(body, request.n, self.url, may_be_stopped=request.stop.is_set())

    async def _stop(self, stop: asyncio.Event, request_id: str) -> None:
        """Ends the request once `stop` is set. Asks until the answer is there, since the generator
        may not have it yet.
        """
        await stop.wait()
        while True:
            with suppress(PipelineRLError):  # the answer, or its own failure, is waited for anyway
                await self._post("/v1/cancel", {"request_id": request_id})
            await asyncio.sleep(_CANCEL_AGAIN_S)

    async def _post(self, path: str, body: dict[str, Any]) -> bytes:
        headers = {**self._headers, **tracing.headers()}
        try:
            async with self._session.post(
                f"{self.url}{path}", json=body, headers=headers
            ) as response:
                answer = await response.read()
                if response.status != 200:
                    raise _error_of(
                        self.url, response.status, answer, response.headers.get("Retry-After")
                    )
                return answer
        except aiohttp.ClientConnectorError as error:
            raise GeneratorAway(f"{self.url}: {error}", _DEFAULT_RETRY_AFTER_S) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ConnectionLost(f"{self.url}: {type(error).__name__}: {error}") from error

    async def serves(self) -> bool:
        """Whether it has the job's weights and takes requests; an engine that does not tell does."""
        try:
            async with (
                asyncio.timeout(_READY_S),
                self._session.get(f"{self.url}/ready", headers=self._headers) as response,
            ):
                return response.status != 503
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def load(self) -> GeneratorLoad:
        """How full it is. Raises TemporaryError when it does not say."""
        try:
            async with self._session.get(f"{self.url}/load", headers=self._headers) as response:
                response.raise_for_status()
                return GeneratorLoad(generator=self.url, **await response.json())
        except (aiohttp.ClientError, TimeoutError, ValueError, TypeError) as error:
            raise TemporaryError(f"{self.url}: {type(error).__name__}: {error}") from error


def _error_of(url: str, status: int, body: bytes, retry_after: str | None) -> Exception:
    text = f"{url}: HTTP {status}: {_message_of(body)}"
    if status in (429, 503):
        return GeneratorAway(text, _seconds(retry_after))
    if status in (401, 403):
        return SettingsError(
            f"{text}; the actor's --token-file must hold the token of the job's generators"
        )
    if status >= 500:
        return TemporaryError(text)
    return GivenUp(f"http_{status}", text)


def _message_of(body: bytes) -> str:
    text = body.decode(errors="replace")
    with suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(text)["error"]["message"])
    return text[:_MAX_ERROR_CHARACTERS]


def _seconds(retry_after: str | None) -> float:
    try:
        seconds = float(retry_after or _DEFAULT_RETRY_AFTER_S)
    except ValueError:  # the header may hold a date
        return _DEFAULT_RETRY_AFTER_S
    return min(max(seconds, 0.05), 30.0) if math.isfinite(seconds) else _DEFAULT_RETRY_AFTER_S


def parse_completions(
    body: bytes, n: int, url: str, *, may_be_stopped: bool = False
) -> Completions:
    """The checked answer. Raises GivenUp with the reason "bad_response" when it breaks the
    generator's contract.
    """
    try:
        answer = json.loads(body)
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        complete = tuple(
            not (may_be_stopped and choice["finish_reason"] == "abort") for choice in choices
        )
        turns = tuple(
            _parse_choice(choice, ended) for choice, ended in zip(choices, complete, strict=True)
        )
        prompt_token_ids = tuple(int(token) for token in answer["prompt_token_ids"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise GivenUp(
            "bad_response", f"{url}: not a completion: {type(error).__name__}: {error}"
        ) from error
    if len(turns) != n or not prompt_token_ids:
        raise GivenUp(
            "bad_response",
            f"{url}: {len(turns)} choices of {n}, {len(prompt_token_ids)} prompt token ids",
        )
    return Completions(prompt_token_ids, turns, complete)


def _parse_choice(choice: dict[str, Any], is_complete: bool) -> Turn:
    token_ids = tuple(int(token) for token in choice["token_ids"])
    logprobs = tuple(float(logprob) for logprob in choice["token_logprobs"])
    runs = tuple(
        VersionRun(int(version), int(num_tokens))
        for version, num_tokens in choice["weight_versions"]
        if num_tokens
    )
    in_runs = sum(run.num_tokens for run in runs)
    if not len(token_ids) == len(logprobs) == in_runs:
        raise ValueError(
            f"{len(token_ids)} token ids, {len(logprobs)} log-probabilities, version runs over "
            f"{in_runs} tokens"
        )
    if any(run.policy_version < 0 or run.num_tokens < 0 for run in runs):
        raise ValueError(
            f"weight_versions={choice['weight_versions']} before the job's first weights"
        )
    if not all(math.isfinite(logprob) for logprob in logprobs):
        raise ValueError("a log-probability is not finite")
    text = choice["message"]["content"]
    reason = _FINISH_REASONS[choice["finish_reason"]] if is_complete else FinishReason.LENGTH
    return Turn("" if text is None else str(text), token_ids, logprobs, runs, reason)
