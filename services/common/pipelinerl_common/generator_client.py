"""The one client of a generator's HTTP contract: typed answers, and one translation of everything
that can go wrong into our errors.
"""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from pipelinerl_common import tracing
from pipelinerl_common.errors import MalformedMessage, PipelineRLError, Refused, Unavailable
from pipelinerl_common.generator_api import (
    CancelRequest,
    CancelResponse,
    CompletionRequest,
    CompletionResponse,
    ErrorResponse,
    HealthResponse,
    InitGroupRequest,
    InitGroupResponse,
    LoadResponse,
    ReadyResponse,
    ScoreRequest,
    ScoreResponse,
    UpdateRequest,
    UpdateResponse,
    WeightsResponse,
)

Response = TypeVar("Response", bound=BaseModel)

ANSWER_GRACE_S = 5.0
"""A generator ends a weight call by itself at the deadline it was given; its answer may take this
much longer.
"""
MAX_SAMPLES_BYTES = 1 << 30
"""Longest answer with tokens, for example of 4096 choices of 5000 tokens."""
MAX_ANSWER_BYTES = 1 << 20
"""Longest answer of every other call, and of every error."""
_MAX_ERROR_CHARACTERS = 500
_CONNECT_S = 10.0
_DEFAULT_RETRY_AFTER_S, _MIN_RETRY_AFTER_S, _MAX_RETRY_AFTER_S = 0.5, 0.05, 30.0


class GeneratorError(PipelineRLError):
    """A call to a generator failed. It is Unavailable, Refused or MalformedMessage as well.

    `status` is the HTTP status, 0 when no answer came; `kind` is the class of the generator's own
    error; `serving_version` is the version that it says it serves. Without an ErrorResponse they
    are "" and -1.
    """

    def __init__(
        self, message: str, status: int = 0, kind: str = "", serving_version: int = -1
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.serving_version = serving_version


class GeneratorUnavailable(GeneratorError, Unavailable):
    """The generator failed (5xx) or cannot be reached; a later attempt may succeed."""

    retry_after_s = _DEFAULT_RETRY_AFTER_S


class GeneratorAway(GeneratorUnavailable):
    """The generator refuses connections, serves nothing yet, or is full (429, 503). Ask again
    after `retry_after_s`.
    """


class ConnectionLost(GeneratorUnavailable):
    """The connection broke during the call, which may itself be the cause."""


class NoAnswer(ConnectionLost):
    """The deadline passed. On a busy machine this does not yet mean that the generator is dead."""


class GeneratorRefused(GeneratorError, Refused):
    """The generator understood the request and refuses it (every other status)."""


class BadAnswer(GeneratorError, MalformedMessage):
    """The generator's answer breaks the contract, or is too long."""


class GeneratorClient:
    """Calls to the generator at base URL `url`, for example "http://127.0.0.1:8000".

    Without a `session`, every call has a fresh connection. A caller that cancels a call closes its
    connection, which is what stops the generator's work for it. Every call raises GeneratorError.
    """

    def __init__(
        self, url: str, token: str | None = None, session: aiohttp.ClientSession | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session = session

    async def complete(
        self, request: CompletionRequest, timeout_s: float | None
    ) -> CompletionResponse:
        """`timeout_s` is None for a caller that has a deadline of its own around the call."""
        path = "/v1/chat/completions"
        return await self._call(path, CompletionResponse, timeout_s, request, MAX_SAMPLES_BYTES)

    async def cancel(self, request_id: str, timeout_s: float) -> bool:
        """Stops the completion of that name. Returns whether there was one."""
        request = CancelRequest(request_id=request_id)
        return (await self._call("/v1/cancel", CancelResponse, timeout_s, request)).found

    async def score(self, request: ScoreRequest, timeout_s: float) -> ScoreResponse:
        """Returns the log-probabilities of given tokens."""
        return await self._call("/v1/score", ScoreResponse, timeout_s, request, MAX_SAMPLES_BYTES)

    async def init_process_group(self, request: InitGroupRequest) -> InitGroupResponse:
        """Returns when the group has formed, at most ANSWER_GRACE_S after the deadline."""
        timeout_s = request.timeout_s + ANSWER_GRACE_S
        return await self._call("/init_process_group", InitGroupResponse, timeout_s, request)

    async def update_weights(self, request: UpdateRequest) -> UpdateResponse:
        """Returns when the version is served, at most ANSWER_GRACE_S after the deadline."""
        timeout_s = request.timeout_s + ANSWER_GRACE_S
        return await self._call("/request_weight_update", UpdateResponse, timeout_s, request)

    async def weights(self, timeout_s: float) -> WeightsResponse:
        """Returns which weights the generator serves, and its group."""
        return await self._call("/weights", WeightsResponse, timeout_s)

    async def load(self, timeout_s: float) -> LoadResponse:
        """Returns the generator's load, and what its steps have cost."""
        return await self._call("/load", LoadResponse, timeout_s)

    async def check_health(self, timeout_s: float) -> None:
        """Returns when the generator is alive."""
        await self._call("/health", HealthResponse, timeout_s)

    async def is_ready(self, timeout_s: float) -> bool:
        """Returns whether the generator has the job's weights and takes requests. An engine without
        this endpoint counts as ready.
        """
        try:
            await self._call("/ready", ReadyResponse, timeout_s)
        except GeneratorError as error:
            return error.status not in (0, 503)
        return True

    async def _call(
        self,
        path: str,
        answer: type[Response],
        timeout_s: float | None,
        request: BaseModel | None = None,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> Response:
        """Posts `request`, or gets the path without one."""
        url = self.url + path
        headers = {**self._headers, **tracing.headers()}
        method, body = "GET", None
        if request is not None:
            method = "POST"
            headers["Content-Type"] = "application/json"
            # Only what the caller has set: a generator of an older release refuses newer fields.
            body = request.model_dump_json(exclude_unset=True, exclude_none=True).encode()
        # A call without a deadline must still end when its connection cannot be made.
        timeout = aiohttp.ClientTimeout(
            total=timeout_s, sock_connect=_CONNECT_S if timeout_s is None else None
        )
        try:
            async with (
                self._connected() as session,
                session.request(
                    method, url, data=body, headers=headers, timeout=timeout
                ) as response,
            ):
                if response.status != 200:
                    raise _error_of(url, response, await _read(response, MAX_ANSWER_BYTES))
                return _parse(url, await _read(response, max_bytes), max_bytes, answer)
        except aiohttp.ClientConnectorError as error:
            raise GeneratorAway(f"{url}: {type(error).__name__}: {error}") from error
        except TimeoutError as error:
            waited = "" if timeout_s is None else f" within {timeout_s:g} s"
            raise NoAnswer(f"{url}: no answer{waited}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionLost(f"{url}: {type(error).__name__}: {error}") from error

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[aiohttp.ClientSession]:
        if self._session is not None:
            yield self._session
            return
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            yield session


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytearray:
    """The body. When it is longer than `max_bytes`, its first bytes, and more than so many."""
    body = bytearray()
    while len(body) <= max_bytes and (chunk := await response.content.readany()):
        body += chunk
    return body


def _parse(url: str, body: bytearray, max_bytes: int, answer: type[Response]) -> Response:
    if len(body) > max_bytes:
        raise BadAnswer(f"{url}: the answer has more than {max_bytes} bytes", 200)
    try:
        return answer.model_validate_json(body)
    except ValidationError as error:
        text = str(error)[:_MAX_ERROR_CHARACTERS]
        # Without the cause, which would log a fault for every token of a long answer.
        raise BadAnswer(f"{url}: not the expected answer: {text}", 200) from None


def _error_of(url: str, response: aiohttp.ClientResponse, body: bytearray) -> GeneratorError:
    """The contract's error for a status and its ErrorResponse. An error of something in between, a
    proxy for example, is shown as it is.
    """
    status, kind, version = response.status, "", -1
    text = body.decode(errors="replace") or str(response.reason)
    with suppress(ValidationError):
        detail = ErrorResponse.model_validate_json(body).error
        text, kind, version = detail.message, detail.type, detail.serving_version
    message = f"{url}: HTTP {status}: {text[:_MAX_ERROR_CHARACTERS]}"
    if status in (429, 503):
        away = GeneratorAway(message, status, kind, version)
        away.retry_after_s = _retry_after_s(response.headers.get("Retry-After"))
        return away
    failure = GeneratorUnavailable if status >= 500 else GeneratorRefused
    return failure(message, status, kind, version)


def _retry_after_s(header: str | None) -> float:
    with suppress(ValueError):  # there may be no header, or one that holds a date
        if math.isfinite(seconds := float(header or "")):
            return min(max(seconds, _MIN_RETRY_AFTER_S), _MAX_RETRY_AFTER_S)
    return _DEFAULT_RETRY_AFTER_S
