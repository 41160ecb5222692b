"""The operator's own, over all jobs. What only the leader knows is missing on the other replicas."""

from typing import Final

from pipelinerl_common.metrics.metric import OPERATOR, SECONDS, Kind, Metric, counter, gauge

_O: Final = (OPERATOR,)

OPERATOR_METRICS: Final[tuple[Metric, ...]] = (
    gauge("operator_leader", "replicas", _O, "1 on the replica that leads, 0 on the others."),
    Metric(
        "operator_reconcile_seconds",
        Kind.HISTOGRAM,
        "seconds",
        _O,
        "Looks at a job by their duration.",
        buckets=SECONDS,
    ),
    counter(
        "operator_reconciles_total",
        "jobs",
        _O,
        "Looks at a job by outcome: done, retried after an error of the API server, failed by a "
        "fault of the operator.",
        {"outcome": ("done", "retried", "failed")},
    ),
    gauge("operator_queue_depth", "jobs", _O, "Jobs that wait to be looked at."),
    gauge("operator_queue_oldest_seconds", "seconds", _O, "How long the first of them has waited."),
    gauge(
        "operator_watch_silence_seconds",
        "seconds",
        _O,
        "Longest time since something was heard on a watch.",
    ),
    gauge("operator_watches", "watches", _O, "Watches that are kept."),
    counter(
        "operator_watch_restarts_total",
        "watches",
        _O,
        "Lists and watches that were begun again after a failure.",
    ),
    counter(
        "operator_api_requests_total",
        "requests",
        _O,
        "Requests to the API server by verb and HTTP status; `none` for no answer.",
        {"verb": (), "code": ()},
    ),
    gauge("operator_jobs", "jobs", _O, "Jobs by phase.", {"phase": ()}),
    gauge("operator_memory_bytes", "bytes", _O, "Resident memory of the operator."),
)
