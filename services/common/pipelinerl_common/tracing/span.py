"""Spans of a trace, and the tracer that starts them. Without tracing every span is NOTHING, which
costs next to nothing.

    async with open_tracer(job, "actor", "actor-0") as tracer:
        with tracer.continued("rollout", lease.traceparent, group_size=8):  # or tracer.root(...)
            with span("verify") as verifying:  # a child of the span that runs now
                ...
                verifying.set(reward=1.0)

A span's place in its trace travels as W3C `traceparent` text ("" when nothing is traced): in gRPC
metadata, NATS and HTTP headers, leases and step plans.
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipelinerl_common.settings import Job


TRACEPARENT = "traceparent"
"""Name of the header or metadata key."""

Attribute = str | int | float | bool


class Span:
    """A piece of work in a trace. This class itself is the span of untraced work."""

    traceparent = ""
    trace_id = ""
    """Id of the trace for log lines: 32 hexadecimal digits, or empty."""

    def child(
        self, name: str, attributes: Mapping[str, Attribute]
    ) -> AbstractContextManager["Span"]:
        return _NO_BLOCK

    def set(self, **attributes: Attribute) -> None:
        """Adds attributes that become known during the work."""


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
    """Headers that make a message or request part of the trace; empty when nothing is traced."""
    traceparent = _current.get().traceparent
    return {TRACEPARENT: traceparent} if traceparent else {}


@contextmanager
def called_by(traceparent: str) -> Iterator[None]:
    """Sets what `caller` returns in the block and in tasks that start in it."""
    token = _caller.set(traceparent)
    try:
        yield
    finally:
        with suppress(ValueError):  # a generator that is closed by another task ends in its context
            _caller.reset(token)


def caller() -> str:
    """`traceparent` of the gRPC call that is being answered; "" when its caller traces nothing."""
    return _caller.get()


class Tracer:
    """Starts spans. This class itself traces nothing."""

    def root(
        self, name: str, links: Sequence[str] = (), **attributes: Attribute
    ) -> AbstractContextManager[Span]:
        """The first span of a trace. `links` are `traceparent`s of spans in other traces that it
        depends on.
        """
        return nullcontext(NOTHING)

    def sampled_root(self, name: str, **attributes: Attribute) -> AbstractContextManager[Span]:
        """The first span of a trace for a share of the calls, `sampleRatio`; NOTHING for the
        others.
        """
        return nullcontext(NOTHING)

    def continued(
        self, name: str, traceparent: str, **attributes: Attribute
    ) -> AbstractContextManager[Span]:
        """A span below one of another process, or below an earlier one of this process; NOTHING for
        an empty `traceparent`.
        """
        return nullcontext(NOTHING)


@asynccontextmanager
async def open_tracer(job: "Job", role: str, instance: str) -> AsyncIterator[Tracer]:
    """The tracer of one process. Spans that are unsent when the block ends get a few seconds.

    OpenTelemetry is imported only when the job traces. An unreachable collector loses spans, never
    time.
    """
    settings = job.spec.telemetry.tracing
    if settings is None:
        yield Tracer()
        return
    from pipelinerl_common.tracing.otlp import OtlpTracer

    tracer = OtlpTracer(
        settings,
        {"service.name": f"pipelinerl-{role}", "service.instance.id": instance, "job": job.name},
    )
    try:
        yield tracer
    finally:
        await tracer.close()
