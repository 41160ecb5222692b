"""The operator, and the processes of all jobs in the cluster."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from monitoring.dashboards.page import page
from monitoring.dashboards.panel import (
    BYTES,
    PER_SECOND,
    SECONDS,
    SHORT,
    Limit,
    Panel,
    rows,
)


def operating() -> Dashboard:
    return rows(
        page(
            "operating",
            "operator and cluster",
            "Does the operator lead and keep up; do the jobs' processes run.",
        ),
        ("Operator", _OPERATOR),
        ("API server", _API_SERVER),
        ("Processes of jobs", _PROCESSES),
    )


_OPERATOR = (
    Panel(
        "Leaders",
        "Replicas of the operator that lead: 1. With 0, jobs run on but nothing is reconciled or "
        "restarted.",
        SHORT,
        (
            ("sum(pipelinerl_operator_leader)", "leaders"),
            ("count(pipelinerl_operator_leader)", "replicas"),
        ),
        Limit(1, below=True),
        low=0,
    ),
    Panel(
        "Jobs by phase",
        "PipelineRLJobs that the operator knows.",
        SHORT,
        (("sum by (phase) (pipelinerl_operator_jobs)", "{{phase}}"),),
        low=0,
        stacked=True,
    ),
    Panel(
        "Looks at a job",
        "Per second by outcome: done, retried after an error of the API server, failed by a fault "
        "of the operator.",
        PER_SECOND,
        (
            (
                "sum by (outcome) (rate(pipelinerl_operator_reconciles_total[$__rate_interval]))",
                "{{outcome}}",
            ),
        ),
        low=0,
    ),
    Panel(
        "Time of a look",
        "Half, and 99 in 100, of the looks take no longer.",
        SECONDS,
        tuple(
            (
                f"histogram_quantile({share}, sum by (le) "
                f"(rate(pipelinerl_operator_reconcile_seconds_bucket[$__rate_interval])))",
                f"{share:.0%}",
            )
            for share in (0.5, 0.99)
        ),
        Limit(5),
        low=0,
    ),
    Panel(
        "Queue",
        "Jobs that wait to be looked at.",
        SHORT,
        (("max(pipelinerl_operator_queue_depth)", "jobs"),),
        low=0,
    ),
    Panel(
        "Oldest in the queue",
        "How long the first job of the queue has waited.",
        SECONDS,
        (("max(pipelinerl_operator_queue_oldest_seconds)", "oldest"),),
        Limit(10, 60),
        low=0,
    ),
)

_API_SERVER = (
    Panel(
        "Requests",
        "Of the operator to the API server, per second by HTTP status; `none` is no answer.",
        PER_SECOND,
        (
            (
                "sum by (code) (rate(pipelinerl_operator_api_requests_total[$__rate_interval]))",
                "{{code}}",
            ),
        ),
        low=0,
        stacked=True,
    ),
    Panel(
        "Silence of the watches",
        "Longest time since something was heard on a watch; the API server sends bookmarks about "
        "every minute.",
        SECONDS,
        (("max(pipelinerl_operator_watch_silence_seconds)", "silence"),),
        Limit(300, 900),
        low=0,
    ),
    Panel(
        "Watches begun again",
        "Lists and watches per second that began again after a failure.",
        PER_SECOND,
        (("sum(rate(pipelinerl_operator_watch_restarts_total[$__rate_interval]))", "restarts"),),
        Limit(0.1),
        low=0,
    ),
)

_PROCESSES = (
    Panel(
        "Restarts in the last hour",
        "Processes of jobs that were started again, by role.",
        SHORT,
        (
            (
                "sum by (namespace, job, restarted) (increase(pipelinerl_restarts_total{@}[1h]))",
                "{{job}} {{restarted}}",
            ),
        ),
        Limit(3),
        low=0,
    ),
    Panel(
        "Memory by role",
        "Resident memory of the largest process of each role. A steady rise is a leak.",
        BYTES,
        (("max by (namespace, job, role) (pipelinerl_memory_bytes{@})", "{{job}} {{role}}"),),
        low=0,
    ),
    Panel(
        "Memory of the operator",
        "Resident memory of each replica.",
        BYTES,
        (("max by (pod, instance) (pipelinerl_operator_memory_bytes)", "{{pod}} {{instance}}"),),
        Limit(450e6),
        low=0,
    ),
)
