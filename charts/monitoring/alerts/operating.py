"""Do the processes and the operator run?"""

from typing import Final

from monitoring.alerts.alert import Alert, Severity

OPERATING: Final = (
    Alert(
        "PipelineRLRestarts",
        Severity.WARNING,
        "sum by (namespace, job, restarted) (increase(pipelinerl_restarts_total[1h])) > @restarts@",
        "0m",
        "{{ $labels.restarted }} of {{ $labels.job }} restarts often",
        "{{ $value | humanize }} processes of the role {{ $labels.restarted }} of {{ $labels.job "
        "}} were started again within "
        "an hour (limit @restarts@).",
        fires={'pipelinerl_restarts_total{job="sums",restarted="actor"}': "0x140 0+1x40"},
        quiet={'pipelinerl_restarts_total{job="sums",restarted="actor"}': "0x170 2x10"},
        thresholds={"restarts": 3},
    ),
    Alert(
        "PipelineRLOperatorWithoutLeader",
        Severity.CRITICAL,
        "sum by (namespace) (pipelinerl_operator_leader) == 0 or absent(pipelinerl_operator_leader)",
        "5m",
        "No replica of the operator leads",
        "No replica of the operator has led for 5 minutes, or none is scraped: jobs are not "
        "reconciled and no process is "
        "restarted. What runs goes on.",
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
        "{{ $value | humanize }} looks at a job ended with a fault of the operator within 15 "
        "minutes.",
        fires={'pipelinerl_operator_reconciles_total{outcome="failed"}': "0x170 2x10"},
        quiet={'pipelinerl_operator_reconciles_total{outcome="failed"}': "2x180"},
    ),
    Alert(
        "PipelineRLOperatorBehind",
        Severity.WARNING,
        "max by (namespace) (pipelinerl_operator_queue_oldest_seconds) > @operatorQueueSeconds@",
        "5m",
        "The operator falls behind",
        "A job has waited {{ $value | humanizeDuration }} to be looked at by the operator (limit "
        "@operatorQueueSeconds@ s).",
        fires={"pipelinerl_operator_queue_oldest_seconds": "0x100 0+60x80"},
        quiet={"pipelinerl_operator_queue_oldest_seconds": "5x180"},
        thresholds={"operatorQueueSeconds": 60},
    ),
    Alert(
        "PipelineRLOperatorDeaf",
        Severity.WARNING,
        "max by (namespace) (pipelinerl_operator_watch_silence_seconds) > @watchSilenceSeconds@",
        "5m",
        "The operator hears nothing from the API server",
        "Nothing was heard on a watch of the operator for {{ $value | humanizeDuration }} (limit "
        "@watchSilenceSeconds@ s).",
        fires={"pipelinerl_operator_watch_silence_seconds": "0x100 0+60x80"},
        quiet={"pipelinerl_operator_watch_silence_seconds": "120x180"},
        thresholds={"watchSilenceSeconds": 900},
    ),
)
