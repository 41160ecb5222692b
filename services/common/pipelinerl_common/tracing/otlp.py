"""Spans of the OpenTelemetry SDK, sent by OTLP over gRPC. The only module that imports
opentelemetry.
"""

import asyncio
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, SpanContext, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pipelinerl_common.settings.telemetry import TracingSettings
from pipelinerl_common.tracing.span import NOTHING, TRACEPARENT, Attribute, Span, Tracer, _current

log = logging.getLogger(__name__)

_EXPORT_S = 5.0
"""Longest time for one export; its spans are lost beyond it."""
_CLOSE_S = 8.0
_MAX_WAITING_SPANS = 4096
_SEND_EVERY_MS = 1000

_CONTEXT = TraceContextTextMapPropagator()


class _OtlpSpan(Span):
    """A recorded span."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        context = span.get_span_context()
        self._tracer = tracer
        self._span = span
        self.trace_id = f"{context.trace_id:032x}"
        self.traceparent = f"00-{self.trace_id}-{context.span_id:016x}-{context.trace_flags:02x}"

    def child(self, name: str, attributes: Mapping[str, Attribute]) -> AbstractContextManager[Span]:
        parent = trace.set_span_in_context(self._span)
        return _running(self._tracer, self._tracer.start_span(name, parent, attributes=attributes))

    def set(self, **attributes: Attribute) -> None:
        self._span.set_attributes(attributes)


@contextmanager
def _running(tracer: trace.Tracer, started: trace.Span) -> Iterator[Span]:
    """Makes a span the current one for the length of the block; records an error that leaves the
    block.
    """
    made = _OtlpSpan(tracer, started)
    token = _current.set(made)
    try:
        yield made
    except BaseException as error:
        kind = (
            "cancelled"
            if isinstance(error, asyncio.CancelledError)
            else f"{type(error).__name__}: {error}"
        )
        started.set_status(Status(StatusCode.ERROR, kind[:500]))
        raise
    finally:
        _current.reset(token)
        started.end()


class OtlpTracer(Tracer):
    """Sends spans in the background, in batches; a full queue drops spans."""

    def __init__(self, settings: TracingSettings, resource: Mapping[str, str]) -> None:
        exporter = OTLPSpanExporter(
            endpoint=settings.endpoint,
            insecure=settings.endpoint.startswith("http://"),
            timeout=_EXPORT_S,
        )
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=Resource.create(dict(resource)), shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter, max_queue_size=_MAX_WAITING_SPANS, schedule_delay_millis=_SEND_EVERY_MS
            )
        )
        self._tracer = self._provider.get_tracer("pipelinerl")
        self._sample_ratio = settings.sample_ratio

    def root(
        self, name: str, links: Sequence[str] = (), **attributes: Attribute
    ) -> AbstractContextManager[Span]:
        contexts = [_span_context(each) for each in links]
        linked = [Link(context) for context in contexts if context.is_valid]
        nowhere = trace.set_span_in_context(trace.INVALID_SPAN)
        started = self._tracer.start_span(name, nowhere, attributes=attributes, links=linked)
        return _running(self._tracer, started)

    def sampled_root(self, name: str, **attributes: Attribute) -> AbstractContextManager[Span]:
        if random.random() >= self._sample_ratio:
            return NOTHING.child(name, attributes)
        return self.root(name, (), **attributes)

    def continued(
        self, name: str, traceparent: str, **attributes: Attribute
    ) -> AbstractContextManager[Span]:
        if not traceparent:
            return NOTHING.child(name, attributes)
        parent = _CONTEXT.extract({TRACEPARENT: traceparent})
        return _running(self._tracer, self._tracer.start_span(name, parent, attributes=attributes))

    async def close(self) -> None:
        try:
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.to_thread(self._provider.shutdown)
        except TimeoutError:
            log.warning("the last spans were not sent within %g s", _CLOSE_S)


def _span_context(traceparent: str) -> SpanContext:
    return trace.get_current_span(_CONTEXT.extract({TRACEPARENT: traceparent})).get_span_context()
