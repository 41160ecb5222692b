"""A gRPC server with health, reflection, bearer token and error mapping."""

from __future__ import annotations  # grpc's classes are generic in their stubs only

import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from pipelinerl_common.errors import (
    FatalError,
    PermanentError,
    PipelineRLError,
    Refused,
    SettingsError,
    TemporaryError,
)
from pipelinerl_common.rpc.client import AUTHORIZATION, COMMON_OPTIONS
from pipelinerl_common.tracing import TRACEPARENT, called_by

log = logging.getLogger(__name__)

_MAX_DETAIL_CHARACTERS: Final = 2000
"""Details travel in HTTP/2 trailers, which are limited to 8 KiB."""
_SERVER_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    *COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),  # a second server on the port must fail, not share it
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)
_CODES: Final[tuple[tuple[type[PipelineRLError], grpc.StatusCode], ...]] = (
    (SettingsError, grpc.StatusCode.INVALID_ARGUMENT),
    (Refused, grpc.StatusCode.FAILED_PRECONDITION),
    (PermanentError, grpc.StatusCode.INVALID_ARGUMENT),
    (TemporaryError, grpc.StatusCode.UNAVAILABLE),
    (FatalError, grpc.StatusCode.INTERNAL),
)
"""The first match counts, so subclasses come before their bases."""

RpcHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[RpcHandler | None]]"


class RpcService(NamedTuple):
    """One service of a server, for example (add_AdmissionServicer_to_server, servicer,
    "pipelinerl.v1.Admission").
    """

    add_to_server: Callable[[Any, grpc.aio.Server], None]
    servicer: object
    full_name: str


@dataclass(frozen=True, slots=True)
class RpcServer:
    """A running server. `address` is "host:port" with the port that was really bound."""

    address: str
    port: int


@asynccontextmanager
async def serve(
    listen: str, services: Sequence[RpcService], *, token: str | None, grace_s: float = 5.0
) -> AsyncIterator[RpcServer]:
    """Serves `services` on `listen` ("host:port", port 0 takes a free one) until the block is left.

    Handlers are coroutines or async generators and raise our errors. Every call except health needs
    the token, when there is one. On leaving, health turns to NOT_SERVING, running calls get
    `grace_s` seconds and are then cancelled. Raises SettingsError when the address cannot be bound.
    """
    interceptors: list[grpc.aio.ServerInterceptor] = (
        [] if token is None else [_TokenInterceptor(token)]
    )
    server = grpc.aio.server(
        interceptors=[*interceptors, _ErrorInterceptor()], options=_SERVER_OPTIONS
    )
    names = [service.full_name for service in services]
    for service in services:
        service.add_to_server(service.servicer, server)
    health_servicer = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection(
        [*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server
    )
    port = _bind(server, listen)
    await server.start()
    for name in ["", *names]:
        await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    try:
        yield RpcServer(address=f"{listen.rpartition(':')[0]}:{port}", port=port)
    finally:
        await health_servicer.enter_graceful_shutdown()
        await server.stop(grace_s)


def _bind(server: grpc.aio.Server, listen: str) -> int:
    host, separator, port = listen.rpartition(":")
    if not separator or not host or not port.isdigit() or int(port) > 65535:
        raise SettingsError(f"listen={listen!r}: expected host:port, for example 127.0.0.1:50051")
    try:
        bound: int = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise SettingsError(
            f"listen={listen!r}: cannot be bound, another process has the port or the host is not "
            f"local: {error}"
        ) from error
    return bound


def _traceparent(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    given = dict(context.invocation_metadata() or ()).get(TRACEPARENT, "")
    return given if isinstance(given, str) else given.decode(errors="replace")


class _TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without the job's token. Health stays open, since a kubelet's probe cannot send
    one.
    """

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> RpcHandler | None:
        handler = await continuation(handler_call_details)
        metadata = dict(handler_call_details.invocation_metadata or ())
        given = metadata.get(AUTHORIZATION, "")
        given_bytes = given if isinstance(given, bytes) else given.encode()
        is_health = handler_call_details.method.startswith(f"/{health.SERVICE_NAME}/")
        if handler is None or is_health or hmac.compare_digest(given_bytes, self._expected):
            return handler

        async def refuse(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            del request
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "the job's bearer token is missing or wrong"
            )

        async def refuse_stream(
            request: Any, context: grpc.aio.ServicerContext[Any, Any]
        ) -> AsyncIterator[Any]:
            await refuse(request, context)
            yield  # makes this an async generator, as streaming handlers are

        return _replaced(handler, unary=refuse, stream=refuse_stream)


class _ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what a handler raises into a status with the right code, and logs errors that were not
    raised on purpose.
    """

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> RpcHandler | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith("/grpc."):  # gRPC's own health and reflection
            return handler

        behaviour: Any = handler.unary_stream if handler.response_streaming else handler.unary_unary

        async def unary(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                with called_by(_traceparent(context)):
                    return await behaviour(request, context)
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # noqa: BLE001 - the boundary where errors become statuses
                await _abort(context, method, error)

        async def stream(
            request: Any, context: grpc.aio.ServicerContext[Any, Any]
        ) -> AsyncIterator[Any]:
            try:
                with called_by(_traceparent(context)):
                    async for response in behaviour(request, context):
                        yield response
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # noqa: BLE001 - the boundary where errors become statuses
                await _abort(context, method, error)

        return _replaced(handler, unary=unary, stream=stream)


def _replaced(
    handler: RpcHandler, *, unary: Callable[..., Any], stream: Callable[..., Any]
) -> RpcHandler:
    """`handler` with another behaviour and the same serializers. Requests stream only in gRPC's own
    reflection service.
    """
    serializers = handler.request_deserializer, handler.response_serializer
    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(stream, *serializers)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(stream, *serializers)
    return grpc.unary_unary_rpc_method_handler(unary, *serializers)


async def _abort(
    context: grpc.aio.ServicerContext[Any, Any], method: str, error: Exception
) -> None:
    code = next(
        (code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL
    )
    details = (
        str(error) if isinstance(error, PipelineRLError) else f"{type(error).__name__}: {error}"
    )
    if code is grpc.StatusCode.INTERNAL:
        log.error("rpc=%s failed", method, exc_info=error)
    await context.abort(code, details[:_MAX_DETAIL_CHARACTERS])
