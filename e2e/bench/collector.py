"""A small OTLP collector: receives spans over gRPC and keeps them, for the bench of telemetry and
for tests of traces.
"""

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


@dataclass(frozen=True)
class ReceivedSpan:
    """One span that arrived. Ids are hexadecimal; `parent` is "" for a trace's first span."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    links: tuple[str, ...]
    """Ids of linked spans."""
    attributes: dict[str, Any]
    start: int
    end: int


@dataclass
class Collector(TraceServiceServicer):
    """The spans that have arrived; gRPC's threads add them."""

    spans: list[ReceivedSpan] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def Export(
        self, request: ExportTraceServiceRequest, context: Any
    ) -> ExportTraceServiceResponse:
        with self._lock:
            for resource in request.resource_spans:
                of_resource = _attributes(resource.resource.attributes)
                for scope in resource.scope_spans:
                    self.spans.extend(
                        _received(str(of_resource["service.name"]), span) for span in scope.spans
                    )
        return ExportTraceServiceResponse()

    def named(self, name: str) -> list[ReceivedSpan]:
        with self._lock:
            return [span for span in self.spans if span.name == name]

    def children(self, parent: ReceivedSpan) -> list[ReceivedSpan]:
        with self._lock:
            return [span for span in self.spans if span.parent == parent.id]


def _received(service: str, span: Any) -> ReceivedSpan:
    return ReceivedSpan(
        service=service,
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        links=tuple(link.span_id.hex() for link in span.links),
        attributes=_attributes(span.attributes),
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@contextmanager
def collecting() -> Iterator[tuple[str, Collector]]:
    """Runs a collector on a free loopback port; yields its endpoint and the collector."""
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", collector
    finally:
        server.stop(1).wait()
