"""Who waits for whom?"""

from typing import Final

from monitoring.alerts.alert import BY_JOB, Alert, Severity

THROUGHPUT: Final = (
    Alert(
        "PipelineRLTrainerStarved",
        Severity.WARNING,
        f'max {BY_JOB} (rate(pipelinerl_trainer_phase_seconds_total{{phase="wait"}}[10m])) > '
        "@waitShare@",
        "20m",
        "The trainer of {{ $labels.job }} waits for samples",
        "The trainer of {{ $labels.job }} spends {{ $value | humanizePercentage }} of its time "
        "waiting for a batch "
        "(limit @waitShare@).",
        fires={'pipelinerl_trainer_phase_seconds_total{job="sums",phase="wait"}': "0+48x180"},
        quiet={'pipelinerl_trainer_phase_seconds_total{job="sums",phase="wait"}': "0+24x180"},
        thresholds={"waitShare": 0.6},
    ),
    Alert(
        "PipelineRLGenerationStopped",
        Severity.CRITICAL,
        f"sum {BY_JOB} (rate(pipelinerl_tokens_generated_total[10m])) == 0 "
        f"and on (namespace, job) sum {BY_JOB} "
        f'(pipelinerl_queue_groups{{stage=~"admitted|running"}}) > 0',
        "10m",
        "Generators of {{ $labels.job }} sample nothing",
        "{{ $labels.job }} has groups to generate and has sampled {{ $value }} tokens per second "
        "for 10 minutes.",
        fires={
            'pipelinerl_tokens_generated_total{job="sums"}': "5000x180",
            'pipelinerl_queue_groups{job="sums",stage="running"}': "8x180",
        },
        quiet={
            'pipelinerl_tokens_generated_total{job="sums"}': "5000x180",
            'pipelinerl_queue_groups{job="sums",stage="running"}': "0x180",
        },
    ),
    Alert(
        "PipelineRLRolloutsFail",
        Severity.WARNING,
        f"sum {BY_JOB} (increase(pipelinerl_groups_failed_total[30m])) "
        f"/ (sum {BY_JOB} (increase(pipelinerl_groups_failed_total[30m])) "
        f"+ sum {BY_JOB} (increase(pipelinerl_groups_published_total[30m]))) > @failedShare@",
        "15m",
        "Rollouts of {{ $labels.job }} fail",
        "{{ $value | humanizePercentage }} of the groups of {{ $labels.job }} were given up by "
        "their actors within 30 minutes "
        "(limit @failedShare@).",
        fires={
            'pipelinerl_groups_failed_total{job="sums"}': "0+1x180",
            'pipelinerl_groups_published_total{job="sums"}': "0+2x180",
        },
        quiet={
            'pipelinerl_groups_failed_total{job="sums"}': "0+1x180",
            'pipelinerl_groups_published_total{job="sums"}': "0+20x180",
        },
        thresholds={"failedShare": 0.2},
    ),
    Alert(
        "PipelineRLStreamNearLimit",
        Severity.CRITICAL,
        f"max {BY_JOB} (pipelinerl_stream_bytes) / max {BY_JOB} (pipelinerl_stream_limit_bytes) > "
        "@streamShare@",
        "5m",
        "The sample stream of {{ $labels.job }} is nearly full",
        "The sample stream of {{ $labels.job }} has used {{ $value | humanizePercentage }} of its "
        "bytes (limit @streamShare@): "
        "when it is full, actors wait.",
        fires={
            'pipelinerl_stream_bytes{job="sums"}': "9e9x180",
            'pipelinerl_stream_limit_bytes{job="sums"}': "1e10x180",
        },
        quiet={
            'pipelinerl_stream_bytes{job="sums"}': "7e9x180",
            'pipelinerl_stream_limit_bytes{job="sums"}': "1e10x180",
        },
        thresholds={"streamShare": 0.8},
    ),
)
