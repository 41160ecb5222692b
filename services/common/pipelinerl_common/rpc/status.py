"""Our errors as gRPC status codes, and back."""

import grpc

from pipelinerl_common.errors import (
    FatalError,
    PermanentError,
    PipelineRLError,
    Refused,
    SettingsError,
    TemporaryError,
    Unavailable,
)

_CODES: tuple[tuple[type[PipelineRLError], grpc.StatusCode], ...] = (
    (SettingsError, grpc.StatusCode.INVALID_ARGUMENT),
    (Refused, grpc.StatusCode.FAILED_PRECONDITION),
    (PermanentError, grpc.StatusCode.INVALID_ARGUMENT),
    (TemporaryError, grpc.StatusCode.UNAVAILABLE),
    (FatalError, grpc.StatusCode.INTERNAL),
)
"""The first match counts, so subclasses come before their bases."""

_ERRORS: dict[grpc.StatusCode, type[PipelineRLError]] = {
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


def code_of(error: Exception) -> grpc.StatusCode:
    """The status code that tells a caller about `error`."""
    return next(
        (code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL
    )


def error_of(method: str, error: grpc.aio.AioRpcError) -> PipelineRLError:
    """Our error for a failed call; its message names the method, the code and what the server said."""
    kind = _ERRORS.get(error.code(), PermanentError)
    return kind(f"{method}: {error.code().name}: {error.details()}")
