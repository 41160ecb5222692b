"""A piece of work in a trace, and the one that runs now. Without tracing every span is NOTHING, and
costs next to nothing.

    with tracer.continued("rollout", lease.traceparent, group_size=8):      # or tracer.root(...)
        with span("verify") as verifying:                                   # a child of whatever runs now
            ...
            verifying.set(reward=1.0)

A span's place in its trace travels as W3C `traceparent` text ("" when nothing is traced): in gRPC
metadata, NATS and HTTP headers, leases and step plans.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar

TRACEPARENT = "traceparent"
"""The header's name, wherever there are headers."""

Attribute = str | int | float | bool


class Span:
    """Nothing: what runs is not traced."""

    traceparent = ""
    trace_id = ""
    """For log lines; 32 hexadecimal digits, or empty."""

    def child(
        self, name: str, attributes: Mapping[str, Attribute]
    ) -> AbstractContextManager["Span"]:
        return _NO_BLOCK

    def set(self, **attributes: Attribute) -> None:
        """Adds what is known only now."""


NOTHING = Span()
_NO_BLOCK = nullcontext(NOTHING)

_current: ContextVar[Span] = ContextVar("span", default=NOTHING)
_caller: ContextVar[str] = ContextVar("caller", default="")


def current() -> Span:
    """The innermost span around the running code; tasks inherit it."""
    return _current.get()


def span(name: str, **attributes: Attribute) -> AbstractContextManager[Span]:
    """A child of the current span for the length of the block; NOTHING when nothing is traced."""
    return _current.get().child(name, attributes)


def headers() -> dict[str, str]:
    """What a message or request must carry to be part of the trace; empty when nothing is traced."""
    traceparent = _current.get().traceparent
    return {TRACEPARENT: traceparent} if traceparent else {}


@contextmanager
def called_by(traceparent: str) -> Iterator[None]:
    """What `caller` says in the block, and in tasks that begin in it."""
    token = _caller.set(traceparent)
    try:
        yield
    finally:
        with suppress(ValueError):  # a generator that is closed elsewhere ends in another context
            _caller.reset(token)


def caller() -> str:
    """`traceparent` of the gRPC call that is being answered; "" when its caller traces nothing."""
    return _caller.get()
