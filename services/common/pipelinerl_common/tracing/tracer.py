"""Where spans begin. One tracer per process; off unless `spec.telemetry.tracing` is set."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING

from pipelinerl_common.tracing.span import NOTHING, Attribute, Span

if TYPE_CHECKING:
    from pipelinerl_common.settings import Job


class Tracer:
    """Traces nothing."""

    def root(
        self, name: str, links: Sequence[str] = (), **attributes: Attribute
    ) -> AbstractContextManager[Span]:
        """The first span of a trace. `links` are `traceparent`s of spans in other traces that it
        depends on.
        """
        return nullcontext(NOTHING)

    def sampled_root(self, name: str, **attributes: Attribute) -> AbstractContextManager[Span]:
        """The same for a share of the calls only, `sampleRatio`; NOTHING for the others."""
        return nullcontext(NOTHING)

    def continued(
        self, name: str, traceparent: str, **attributes: Attribute
    ) -> AbstractContextManager[Span]:
        """A span below one of another process, or below an earlier one of this; NOTHING for an
        empty `traceparent`.
        """
        return nullcontext(NOTHING)


@asynccontextmanager
async def open_tracer(job: "Job", role: str, instance: str) -> AsyncIterator[Tracer]:
    """The tracer of one process. Spans that are not sent when the block is left get a few seconds.

    OpenTelemetry is imported only when the job traces. A collector that is away costs spans, never
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
