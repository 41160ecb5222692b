"""Dashboard and alerts on the operator, and on the processes of all jobs."""

from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard

from monitoring.alert import Alert
from monitoring.panel import (
    BYTES,
    PER_SECOND,
    SECONDS,
    SHORT,
    Limit,
    Panel,
    page,
    rows,
)
from pipelinerl_common.judgements import (
    OPERATOR_MEMORY,
    OPERATOR_QUEUE,
    RECONCILE_SECONDS,
    RESTARTS,
    WATCH_RESTARTS,
    WATCH_SILENCE,
    Severity,
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
        "Replicas of the operator that lead: 1. With 0, jobs keep running, but none is reconciled "
        "and nothing is restarted.",
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
        "Reconciles",
        "Reconciles of a job per second by outcome: done, retried after an error of the API "
        "server, failed by a fault of the operator.",
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
        "Time of a reconcile",
        "Median and 99th percentile of a reconcile's time.",
        SECONDS,
        tuple(
            (
                f"histogram_quantile({share}, sum by (le) "
                "(rate(pipelinerl_operator_reconcile_seconds_bucket[$__rate_interval])))",
                f"{share:.0%}",
            )
            for share in (0.5, 0.99)
        ),
        Limit.at(RECONCILE_SECONDS),
        low=0,
    ),
    Panel(
        "Queue",
        "Jobs that wait to be reconciled.",
        SHORT,
        (("max(pipelinerl_operator_queue_depth)", "jobs"),),
        low=0,
    ),
    Panel(
        "Oldest in the queue",
        "Time that the first job of the queue has waited.",
        SECONDS,
        (("max(pipelinerl_operator_queue_oldest_seconds)", "oldest"),),
        Limit.of(OPERATOR_QUEUE),
        low=0,
    ),
)

_API_SERVER = (
    Panel(
        "Requests",
        "Requests of the operator to the API server per second by HTTP status; `none` is no "
        "response.",
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
        "Longest time since an event arrived on a watch; the API server sends bookmarks about "
        "every minute.",
        SECONDS,
        (("max(pipelinerl_operator_watch_silence_seconds)", "silence"),),
        Limit.of(WATCH_SILENCE),
        low=0,
    ),
    Panel(
        "Restarted watches",
        "Lists and watches per second that were restarted after a failure.",
        PER_SECOND,
        (("sum(rate(pipelinerl_operator_watch_restarts_total[$__rate_interval]))", "restarts"),),
        Limit.at(WATCH_RESTARTS),
        low=0,
    ),
)

_PROCESSES = (
    Panel(
        "Restarts in the last hour",
        "Processes of jobs that were restarted, by role.",
        SHORT,
        (
            (
                "sum by (namespace, job, restarted) (increase(pipelinerl_restarts_total{@}[1h]))",
                "{{job}} {{restarted}}",
            ),
        ),
        Limit.at(RESTARTS),
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
        Limit.at(OPERATOR_MEMORY),
        low=0,
    ),
)


OPERATING: Final = (
    Alert(
        "PipelineRLRestarts",
        RESTARTS,
        "sum by (namespace, job, restarted) (increase(pipelinerl_restarts_total[1h])) > @restarts@",
        "0m",
        "{{ $labels.restarted }} of {{ $labels.job }} restarts often",
        "{{ $value | humanize }} processes of the role {{ $labels.restarted }} of {{ $labels.job "
        "}} were restarted within an hour (limit @restarts@).",
        fires={'pipelinerl_restarts_total{job="sums",restarted="actor"}': "0x140 0+1x40"},
        quiet={'pipelinerl_restarts_total{job="sums",restarted="actor"}': "0x170 2x10"},
        threshold="restarts",
    ),
    Alert(
        "PipelineRLOperatorWithoutLeader",
        Severity.CRITICAL,
        "sum by (namespace) (pipelinerl_operator_leader) == 0 "
        "or absent(pipelinerl_operator_leader)",
        "5m",
        "No replica of the operator leads",
        "No replica of the operator has led for 5 minutes, or none is scraped: jobs are not "
        "reconciled and no process is restarted. Running processes continue.",
        fires={
            'pipelinerl_operator_leader{pod="a"}': "0x180",
            'pipelinerl_operator_leader{pod="b"}': "1x170 0x10",
        },
        quiet={
            'pipelinerl_operator_leader{pod="a"}': "0x180",
            'pipelinerl_operator_leader{pod="b"}': "1x170 0x3 1x7",
        },
    ),
    Alert(
        "PipelineRLOperatorFails",
        Severity.WARNING,
        "sum by (namespace) "
        '(increase(pipelinerl_operator_reconciles_total{outcome="failed"}[15m])) > 0',
        "0m",
        "The operator fails on a job",
        "{{ $value | humanize }} reconciles ended with a fault of the operator within 15 minutes.",
        fires={'pipelinerl_operator_reconciles_total{outcome="failed"}': "0x170 2x10"},
        quiet={'pipelinerl_operator_reconciles_total{outcome="failed"}': "2x180"},
    ),
    Alert(
        "PipelineRLOperatorBehind",
        OPERATOR_QUEUE,
        "max by (namespace) (pipelinerl_operator_queue_oldest_seconds) > @operatorQueueSeconds@",
        "5m",
        "The operator falls behind",
        "A job has waited {{ $value | humanizeDuration }} to be reconciled by the operator (limit "
        "@operatorQueueSeconds@ s).",
        fires={"pipelinerl_operator_queue_oldest_seconds": "0x100 0+60x80"},
        quiet={"pipelinerl_operator_queue_oldest_seconds": "5x180"},
        threshold="operatorQueueSeconds",
    ),
    Alert(
        "PipelineRLOperatorDeaf",
        WATCH_SILENCE,
        "max by (namespace) (pipelinerl_operator_watch_silence_seconds) > @watchSilenceSeconds@",
        "5m",
        "The operator receives nothing from the API server",
        "No event has arrived on a watch of the operator for {{ $value | humanizeDuration }} "
        "(limit @watchSilenceSeconds@ s).",
        fires={"pipelinerl_operator_watch_silence_seconds": "0x100 0+60x80"},
        quiet={"pipelinerl_operator_watch_silence_seconds": "120x180"},
        threshold="watchSilenceSeconds",
    ),
)
