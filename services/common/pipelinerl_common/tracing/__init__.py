"""Traces: of groups from their lease to the optimizer step, and of each weight update. Off unless
the job asks for them.
"""

from pipelinerl_common.tracing.span import (
    NOTHING,
    TRACEPARENT,
    Span,
    Tracer,
    called_by,
    caller,
    current,
    headers,
    open_tracer,
    span,
)

__all__ = [
    "NOTHING",
    "TRACEPARENT",
    "Span",
    "Tracer",
    "called_by",
    "caller",
    "current",
    "headers",
    "open_tracer",
    "span",
]
