"""Calls with a deadline that raise our errors, and the options that client and server share."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import grpc

from pipelinerl_common.backoff import Backoff
from pipelinerl_common.errors import (
    PermanentError,
    PipelineRLError,
    Refused,
    TemporaryError,
    Unavailable,
)
from pipelinerl_common.tracing import headers

MAX_MESSAGE_BYTES: Final = 256 << 20
"""A packed micro-batch has about 21 bytes per slot, so this is far above any real message and still
bounds memory.
"""
AUTHORIZATION: Final = "authorization"
COMMON_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
_CLIENT_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    *COMMON_OPTIONS,
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Peers are inside the job; a proxy of the environment must not see them.
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)

_ERRORS: Final[dict[grpc.StatusCode, type[PipelineRLError]]] = {
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: Unavailable,
    grpc.StatusCode.CANCELLED: Unavailable,  # by the server, which is shutting down
    grpc.StatusCode.FAILED_PRECONDITION: Refused,
    grpc.StatusCode.ABORTED: TemporaryError,
    grpc.StatusCode.INTERNAL: TemporaryError,
    grpc.StatusCode.UNKNOWN: TemporaryError,
}
"""Codes that are not listed (INVALID_ARGUMENT, UNAUTHENTICATED, UNIMPLEMENTED, RESOURCE_EXHAUSTED,
...) are permanent.
"""

Request = TypeVar("Request")
Response = TypeVar("Response")


@asynccontextmanager
async def connect(address: str, *, token: str | None) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to `address` ("host:port") for the generated stubs, closed on leaving the block. It
    connects with the first call.
    """
    interceptors: list[Any] = [] if token is None else [_UnaryToken(token), _StreamToken(token)]
    async with grpc.aio.insecure_channel(
        address, options=_CLIENT_OPTIONS, interceptors=interceptors
    ) as channel:
        yield channel


async def call(
    method: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
    request: Request,
    *,
    timeout_s: float,
    retry_s: float = 0.0,
) -> Response:
    """Makes one unary call. Each attempt has `timeout_s`; while the peer is unreachable the call is
    retried for `retry_s` in all.

    Raises Unavailable (unreachable, or no answer in time), Refused, PermanentError, or
    TemporaryError for a fault of the server.
    """
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + retry_s
    backoff = Backoff(0.1, 2.0)
    while True:
        try:
            return await method(request, timeout=timeout_s, metadata=_metadata())
        except grpc.aio.AioRpcError as error:
            translated = _error_of(_name(method), error)
            delay_s = backoff.next_delay()
            # Only an unreachable peer may answer the next attempt; other errors would repeat.
            if not isinstance(translated, Unavailable) or loop.time() + delay_s > give_up_at:
                raise translated from error
        await asyncio.sleep(delay_s)


async def stream_call(
    method: grpc.aio.UnaryStreamMultiCallable[Request, Response],
    request: Request,
    *,
    timeout_s: float,
) -> AsyncGenerator[Response, None]:
    """Yields the responses of a server-streaming call, which is cancelled when the caller stops
    early. `timeout_s` covers all of them.

    Raises as `call` does; never retried, since the caller may have used some responses already.
    """
    response_stream = method(request, timeout=timeout_s, metadata=_metadata())
    try:
        async for response in response_stream:
            yield response
    except grpc.aio.AioRpcError as error:
        raise _error_of(_name(method), error) from error
    finally:
        response_stream.cancel()


def _error_of(method: str, error: grpc.aio.AioRpcError) -> PipelineRLError:
    kind = _ERRORS.get(error.code(), PermanentError)
    return kind(f"{method}: {error.code().name}: {error.details()}")


def _metadata() -> tuple[tuple[str, str], ...] | None:
    """Metadata that makes the call part of the current trace."""
    return tuple(headers().items()) or None


def _name(method: Any) -> str:
    """Example: "pipelinerl.v1.Policy/GetPolicy". Multi-callables keep their path in `_method`."""
    path = getattr(method, "_method", b"rpc")
    return (path.decode() if isinstance(path, bytes) else str(path)).removeprefix("/")


class _Token:
    """Adds the bearer token to each call. grpc.aio takes one interceptor class per kind of call."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def _intercept(
        self,
        continuation: Callable[..., Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        details = client_call_details
        metadata = grpc.aio.Metadata(*(details.metadata or ()))
        metadata.add(AUTHORIZATION, f"Bearer {self._token}")
        with_token = grpc.aio.ClientCallDetails(
            details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
        )
        return await continuation(with_token, request)


class _UnaryToken(_Token, grpc.aio.UnaryUnaryClientInterceptor):
    intercept_unary_unary = _Token._intercept


class _StreamToken(_Token, grpc.aio.UnaryStreamClientInterceptor):
    intercept_unary_stream = _Token._intercept
