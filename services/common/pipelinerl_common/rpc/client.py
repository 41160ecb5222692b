"""Calls with a deadline that raise our errors."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc

from pipelinerl_common.errors import Unavailable
from pipelinerl_common.rpc.options import AUTHORIZATION, CLIENT_OPTIONS
from pipelinerl_common.rpc.status import error_of
from pipelinerl_common.tracing import headers

Request = TypeVar("Request")
Response = TypeVar("Response")

_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0


@asynccontextmanager
async def connect(address: str, *, token: str | None) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to `address` ("host:port") for the generated stubs, closed on leaving. Connects
    with the first call.
    """
    interceptors: list[Any] = [] if token is None else [_UnaryToken(token), _StreamToken(token)]
    async with grpc.aio.insecure_channel(
        address, options=CLIENT_OPTIONS, interceptors=interceptors
    ) as channel:
        yield channel


async def call(
    method: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
    request: Request,
    *,
    timeout_s: float,
    retry_s: float = 0.0,
) -> Response:
    """One unary call. Each try has `timeout_s`; while the peer is away the call is tried again for
    `retry_s` in all.

    Raises Unavailable (away, or no answer in time), Refused, PermanentError, or TemporaryError for
    a fault of the server.
    """
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + retry_s
    backoff_s = _FIRST_BACKOFF_S
    while True:
        try:
            return await method(request, timeout=timeout_s, metadata=_metadata())
        except grpc.aio.AioRpcError as error:
            translated = error_of(_name(method), error)
            if not isinstance(translated, Unavailable) or loop.time() + backoff_s > give_up_at:
                raise translated from error
        await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
        backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)


async def stream_call(
    method: grpc.aio.UnaryStreamMultiCallable[Request, Response],
    request: Request,
    *,
    timeout_s: float,
) -> AsyncGenerator[Response, None]:
    """Responses of a server-streaming call, which is cancelled when the caller stops early.
    `timeout_s` is for all of them.

    Raises as `call` does; never retried, since the caller may have used some responses already.
    """
    response_stream = method(request, timeout=timeout_s, metadata=_metadata())
    try:
        async for response in response_stream:
            yield response
    except grpc.aio.AioRpcError as error:
        raise error_of(_name(method), error) from error
    finally:
        response_stream.cancel()


def _metadata() -> tuple[tuple[str, str], ...] | None:
    """The trace that the call is part of."""
    return tuple(headers().items()) or None


def _name(method: Any) -> str:
    """ "/pipelinerl.v1.Policy/GetPolicy" -> "pipelinerl.v1.Policy/GetPolicy"; multi-callables keep
    their name in `_method`.
    """
    path = getattr(method, "_method", b"rpc")
    return (path.decode() if isinstance(path, bytes) else str(path)).removeprefix("/")


def _with_token(details: grpc.aio.ClientCallDetails, token: str) -> grpc.aio.ClientCallDetails:
    metadata = grpc.aio.Metadata(*(details.metadata or ()))
    metadata.add(AUTHORIZATION, f"Bearer {token}")
    return grpc.aio.ClientCallDetails(
        details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
    )


class _UnaryToken(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_unary_unary(
        self,
        continuation: Callable[..., Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        return await continuation(_with_token(client_call_details, self._token), request)


class _StreamToken(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_unary_stream(
        self,
        continuation: Callable[..., Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        return await continuation(_with_token(client_call_details, self._token), request)
