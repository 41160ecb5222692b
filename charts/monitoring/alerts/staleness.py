"""Is what is trained too old?"""

from typing import Final

from monitoring.alerts.alert import BY_JOB, Alert, Severity

_BATCH: Final = (
    f"(sum {BY_JOB} (increase(pipelinerl_groups_trained_total[30m])) "
    f"/ sum {BY_JOB} (increase(pipelinerl_optimizer_steps_total[30m])))"
)
"""Groups per step, as they were lately."""

_BATCHES: Final = {
    'pipelinerl_groups_trained_total{job="sums",role="preprocessor"}': "0+32x180",
    'pipelinerl_optimizer_steps_total{job="sums",role="trainer"}': "0+1x180",
}

STALENESS: Final = (
    Alert(
        "PipelineRLLagOverBound",
        Severity.CRITICAL,
        f"max {BY_JOB} (pipelinerl_lag_max) > max {BY_JOB} (pipelinerl_staleness_bound_steps)",
        "5m",
        "{{ $labels.job }} trains tokens older than its staleness policy promises",
        "The oldest token of a batch of {{ $labels.job }} has a lag of {{ $value }} steps, more "
        "than the policy's bound.",
        fires={
            'pipelinerl_lag_max{job="sums",role="trainer"}': "5x180",
            'pipelinerl_staleness_bound_steps{job="sums"}': "4x180",
        },
        quiet={
            'pipelinerl_lag_max{job="sums",role="trainer"}': "4x180",
            'pipelinerl_staleness_bound_steps{job="sums"}': "4x180",
        },
    ),
    Alert(
        "PipelineRLLagHigh",
        Severity.WARNING,
        f"max {BY_JOB} (pipelinerl_lag_mean) > @lagSteps@",
        "10m",
        "{{ $labels.job }} trains old tokens",
        "Tokens of {{ $labels.job }} are trained {{ $value | humanize }} steps after they were "
        "sampled, on average "
        "(limit @lagSteps@).",
        fires={'pipelinerl_lag_mean{job="sums"}': "9x180"},
        quiet={'pipelinerl_lag_mean{job="sums"}': "7.5x170 9x5 7.5x5"},
        thresholds={"lagSteps": 8},
    ),
    Alert(
        "PipelineRLLagRising",
        Severity.WARNING,
        f"max {BY_JOB} (avg_over_time(pipelinerl_lag_mean[10m])) "
        f"> @lagRiseFactor@ * max {BY_JOB} (avg_over_time(pipelinerl_lag_mean[30m] offset 30m)) + 1",
        "10m",
        "The lag of {{ $labels.job }} grows",
        "The mean lag of {{ $labels.job }} is {{ $value | humanize }} steps over the last 10 "
        "minutes, more than "
        "@lagRiseFactor@ times what it was half an hour before.",
        fires={'pipelinerl_lag_mean{job="sums"}': "2x150 2+0.2x30"},
        quiet={'pipelinerl_lag_mean{job="sums"}': "2x150 2+0.01x30"},
        thresholds={"lagRiseFactor": 1.5},
    ),
    Alert(
        "PipelineRLEssLow",
        Severity.WARNING,
        f"min {BY_JOB} (avg_over_time(pipelinerl_ess[10m])) < @ess@",
        "10m",
        "The effective sample size of {{ $labels.job }} is low",
        "Only {{ $value | humanizePercentage }} of the batch of {{ $labels.job }} is left as "
        "effective sample size, averaged "
        "over 10 minutes (limit @ess@).",
        fires={'pipelinerl_ess{job="sums"}': "0.95x100 0.4x80"},
        quiet={'pipelinerl_ess{job="sums"}': "0.6x180"},
        thresholds={"ess": 0.5},
    ),
    Alert(
        "PipelineRLQueueTooDeep",
        Severity.WARNING,
        f'sum {BY_JOB} (pipelinerl_queue_groups{{stage="ready"}}) / {_BATCH} > @queueBatches@',
        "15m",
        "Finished groups of {{ $labels.job }} pile up",
        "{{ $value | humanize }} batches of finished groups of {{ $labels.job }} wait for the "
        "trainer (limit @queueBatches@): "
        "each is a step of lag.",
        fires={
            **_BATCHES,
            'pipelinerl_queue_groups{job="sums",role="preprocessor",stage="ready"}': "200x180",
        },
        quiet={
            **_BATCHES,
            'pipelinerl_queue_groups{job="sums",role="preprocessor",stage="ready"}': "100x180",
        },
        thresholds={"queueBatches": 4},
    ),
    Alert(
        "PipelineRLDropsHigh",
        Severity.WARNING,
        "sum by (namespace, job, reason) (increase(pipelinerl_groups_dropped_total[30m])) / on "
        "(namespace, job) group_left () "
        f"(sum {BY_JOB} (increase(pipelinerl_groups_dropped_total[30m])) "
        f"+ sum {BY_JOB} (increase(pipelinerl_groups_trained_total[30m]))) > @dropShare@",
        "15m",
        "{{ $labels.job }} throws many groups away: {{ $labels.reason }}",
        "{{ $value | humanizePercentage }} of the groups of {{ $labels.job }} ended untrained "
        "within 30 minutes for one "
        "reason, {{ $labels.reason }} (limit @dropShare@).",
        fires={
            'pipelinerl_groups_dropped_total{job="sums",reason="stale"}': "0+50x180",
            'pipelinerl_groups_dropped_total{job="sums",reason="failed"}': "0+1x180",
            'pipelinerl_groups_trained_total{job="sums"}': "0+32x180",
        },
        quiet={
            'pipelinerl_groups_dropped_total{job="sums",reason="stale"}': "0+16x180",
            'pipelinerl_groups_dropped_total{job="sums",reason="zero_advantage"}': "0+16x180",
            'pipelinerl_groups_trained_total{job="sums"}': "0+32x180",
        },
        thresholds={"dropShare": 0.5},
    ),
)
