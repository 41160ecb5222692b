"""Errors of the API server, translated into ours.

TemporaryError
├── ApiUnavailable      no answer, an answer cut short, or 5xx
├── TooManyRequests     429, or a server that asks to retry later; carries the seconds
├── Conflict            409: the object changed since it was read; read and decide again
└── Gone                410: the resource version is too old to continue from; list again
PermanentError
├── NotFound            404
├── AlreadyExists       409 of a create
├── Invalid             400, 422: the server does not accept the object
└── Forbidden           401, 403: rights are missing, or the namespace is being deleted
"""

import json
from collections.abc import Mapping
from typing import Any

from pipelinerl_common.errors import PermanentError, PipelineRLError, TemporaryError, Unavailable

MAX_MESSAGE_CHARACTERS = 900
"""Longest message that is kept: one of the API server can contain a whole object."""


class ApiUnavailable(Unavailable):
    """No answer, an answer cut short, or the server's own fault (5xx)."""


class TooManyRequests(TemporaryError):
    """The server asks to retry after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Conflict(TemporaryError):
    """The object is not the one that was read: another resource version, or another UID."""


class Gone(TemporaryError):
    """The resource version is too old to continue from."""


class NotFound(PermanentError):
    """There is no such object."""


class AlreadyExists(PermanentError):
    """An object of that name exists already."""


class Invalid(PermanentError):
    """The server does not accept the object; the message is the server's."""


class Forbidden(PermanentError):
    """The rights are missing, a quota is used up, or the namespace is being deleted."""

    def __init__(self, message: str, *, namespace_terminating: bool = False) -> None:
        super().__init__(message)
        self.namespace_terminating = namespace_terminating


def error_of(
    request: str, code: int, body: bytes, retry_after: str | None = None
) -> PipelineRLError:
    """The error for a response with status `code` to `request`, as "create pods default/a"."""
    status = _status_of(body)
    message = f"{request}: {status.get('message') or f'HTTP {code}'}"[:MAX_MESSAGE_CHARACTERS]
    if code == 429 or (retry_after is not None and code >= 500):
        return TooManyRequests(message, _seconds(retry_after))
    if code == 409:
        return (
            AlreadyExists(message) if status.get("reason") == "AlreadyExists" else Conflict(message)
        )
    if code in (401, 403):
        return Forbidden(message, namespace_terminating=_is_terminating(status))
    kinds: dict[int, type[PipelineRLError]] = {400: Invalid, 404: NotFound, 410: Gone, 422: Invalid}
    return kinds.get(code, ApiUnavailable if code >= 500 else Invalid)(message)


def _status_of(body: bytes) -> Mapping[str, Any]:
    """The `Status` object of an error response; that of a proxy may be anything."""
    try:
        status = json.loads(body)
    except ValueError:
        return {"message": body[:200].decode("utf-8", "replace").strip()}
    return status if isinstance(status, dict) else {}


def _is_terminating(status: Mapping[str, Any]) -> bool:
    causes = (status.get("details") or {}).get("causes") or ()
    return any(cause.get("reason") == "NamespaceTerminating" for cause in causes)


def _seconds(retry_after: str | None) -> float:
    """`Retry-After` in seconds; 1 when it is absent or a date."""
    return min(60.0, float(retry_after)) if retry_after and retry_after.isdigit() else 1.0
