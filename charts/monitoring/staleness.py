"""Dashboard and alerts on staleness: how old trained samples are, at what cost, and why."""

from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard

from monitoring.alert import BY_JOB, Alert
from monitoring.panel import (
    ABOVE_ZERO,
    PER_SECOND,
    PERCENT,
    SECONDS,
    SHORT,
    TOKENS_S,
    Heat,
    Limit,
    Panel,
    newest,
    page,
    per_second,
    quantile,
    rows,
)
from pipelinerl_common.judgements import CLIPPED, DROPS, ESS, LAG, LAG_RISING, QUEUE_DEPTH, Severity


def staleness() -> Dashboard:
    return rows(
        page(
            "staleness",
            "staleness",
            "Lag, effective sample size, queues, and what each layer of the staleness policy "
            "wastes.",
        ),
        ("How old", _AGE),
        ("What it costs", _COST),
        ("Where it comes from", _QUEUES),
        ("What the staleness policy discards, by layer", _WASTE),
    )


_AGE = (
    Heat(
        "Tokens by lag",
        "Trained tokens by the steps between sampling and training.",
        SHORT,
        "pipelinerl_lag_steps",
    ),
    Heat(
        "Groups by staleness",
        "Groups by the lag of their oldest token when they entered a batch.",
        SHORT,
        "pipelinerl_staleness_steps",
    ),
    Panel(
        "Lag and its bound",
        "Mean and largest lag of each batch, and the staleness policy's bound where it has one.",
        SHORT,
        (
            (newest("pipelinerl_lag_mean"), "{{job}} mean"),
            (newest("pipelinerl_lag_max"), "{{job}} largest"),
            (newest("pipelinerl_staleness_bound_steps"), "{{job}} bound"),
        ),
        Limit.at(LAG),
        low=0,
        span=12,
    ),
    Panel(
        "Lag: median, 90th and 99th percentile",
        "Quantiles of the trained tokens' lag.",
        SHORT,
        tuple(
            (quantile(share, "pipelinerl_lag_steps"), f"{{{{job}}}} {share:.0%}")
            for share in (0.5, 0.9, 0.99)
        ),
        low=0,
        span=12,
    ),
)

_COST = (
    Panel(
        "Effective sample size",
        "Share of the batch that counts after importance weights correct for its age. A low raw "
        "value with a high truncated one means that truncation hides the staleness, at the "
        "price of bias.",
        PERCENT,
        (
            (newest("pipelinerl_ess", "min"), "{{job}} raw"),
            (newest("pipelinerl_ess_truncated", "min"), "{{job}} truncated"),
        ),
        Limit.at(ESS),
        low=0,
        high=1,
    ),
    Panel(
        "Tokens clipped or truncated",
        "Share of the tokens whose importance ratio was clipped or truncated.",
        PERCENT,
        ((newest("pipelinerl_clip_fraction"), "{{job}}"),),
        Limit.of(CLIPPED),
        low=0,
    ),
    Panel(
        "Skipped steps",
        "Steps per second that changed nothing because the gradient was not finite.",
        PER_SECOND,
        ((per_second("pipelinerl_skipped_steps_total"), "{{job}}"),),
        Limit(ABOVE_ZERO),
        low=0,
    ),
)

_QUEUES = (
    Panel(
        "Groups by stage",
        "All groups between their prompt's grant and the optimizer step. A deep `ready` means that "
        "the trainer is behind, a deep `stream` that the preprocessor or the reference model "
        "is, a deep `running` that sequences are long.",
        SHORT,
        (("sum by (namespace, job, stage) (pipelinerl_queue_groups{@})", "{{job}} {{stage}}"),),
        low=0,
        stacked=True,
    ),
    Panel(
        "Oldest group by stage",
        "How long the oldest group of each stage has been in it.",
        SECONDS,
        (
            (
                "max by (namespace, job, stage) (pipelinerl_queue_oldest_seconds{@})",
                "{{job}} {{stage}}",
            ),
        ),
        low=0,
    ),
    Panel(
        "Outstanding groups and the policy's limit",
        "Groups that are admitted and not yet in a batch, and the largest number that the "
        "staleness policy allows.",
        SHORT,
        (
            (
                'sum by (namespace, job) (pipelinerl_queue_groups{@,stage!="packed"})',
                "{{job}} outstanding",
            ),
            (newest("pipelinerl_outstanding_limit_groups"), "{{job}} limit"),
        ),
        low=0,
    ),
)

_WASTE = (
    Panel(
        "1. Admission: generation held back",
        "Share of the time in which an actor asked for groups and the staleness policy admitted "
        "none. It costs idle places, but no tokens.",
        PERCENT,
        ((per_second("pipelinerl_admission_closed_seconds_total"), "{{job}}"),),
        low=0,
    ),
    Panel(
        "2. and 3. Running and assembly: tokens discarded",
        "Sampled tokens per second of groups that were cancelled while they ran, or dropped when a "
        "batch was assembled.",
        TOKENS_S,
        ((per_second("pipelinerl_stale_tokens_total", "layer"), "{{job}} {{layer}}"),),
        low=0,
        stacked=True,
    ),
    Panel(
        "All discarded tokens, by reason",
        "Sampled tokens per second that were never trained.",
        TOKENS_S,
        ((per_second("pipelinerl_tokens_dropped_total", "reason"), "{{job}} {{reason}}"),),
        low=0,
        stacked=True,
    ),
)


_BATCH: Final = (
    f"(sum {BY_JOB} (increase(pipelinerl_groups_trained_total[30m])) / sum {BY_JOB} "
    "(increase(pipelinerl_optimizer_steps_total[30m])))"
)
"""Groups per step over the last half hour."""

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
        LAG,
        f"max {BY_JOB} (pipelinerl_lag_mean) > @lagSteps@",
        "10m",
        "{{ $labels.job }} trains old tokens",
        "Tokens of {{ $labels.job }} are trained {{ $value | humanize }} steps after they were "
        "sampled, on average (limit @lagSteps@).",
        fires={'pipelinerl_lag_mean{job="sums"}': "9x180"},
        quiet={'pipelinerl_lag_mean{job="sums"}': "7.5x170 9x5 7.5x5"},
        threshold="lagSteps",
    ),
    Alert(
        "PipelineRLLagRising",
        LAG_RISING,
        f"max {BY_JOB} (avg_over_time(pipelinerl_lag_mean[10m])) > @lagRiseFactor@ * max {BY_JOB} "
        "(avg_over_time(pipelinerl_lag_mean[30m] offset 30m)) + 1",
        "10m",
        "The lag of {{ $labels.job }} grows",
        "The mean lag of {{ $labels.job }} is {{ $value | humanize }} steps over the last 10 "
        "minutes, more than @lagRiseFactor@ times that of half an hour before.",
        fires={'pipelinerl_lag_mean{job="sums"}': "2x150 2+0.2x30"},
        quiet={'pipelinerl_lag_mean{job="sums"}': "2x150 2+0.01x30"},
        threshold="lagRiseFactor",
    ),
    Alert(
        "PipelineRLEssLow",
        ESS,
        f"min {BY_JOB} (avg_over_time(pipelinerl_ess[10m])) < @ess@",
        "10m",
        "The effective sample size of {{ $labels.job }} is low",
        "The effective sample size of {{ $labels.job }} is {{ $value | humanizePercentage }} of "
        "the batch, averaged over 10 minutes (limit @ess@).",
        fires={'pipelinerl_ess{job="sums"}': "0.95x100 0.4x80"},
        quiet={'pipelinerl_ess{job="sums"}': "0.6x180"},
        threshold="ess",
    ),
    Alert(
        "PipelineRLQueueTooDeep",
        QUEUE_DEPTH,
        f'sum {BY_JOB} (pipelinerl_queue_groups{{stage="ready"}}) / {_BATCH} > @queueBatches@',
        "15m",
        "Finished groups of {{ $labels.job }} pile up",
        "{{ $value | humanize }} batches of finished groups of {{ $labels.job }} wait for the "
        "trainer (limit @queueBatches@).",
        fires={
            **_BATCHES,
            'pipelinerl_queue_groups{job="sums",role="preprocessor",stage="ready"}': "200x180",
        },
        quiet={
            **_BATCHES,
            'pipelinerl_queue_groups{job="sums",role="preprocessor",stage="ready"}': "100x180",
        },
        threshold="queueBatches",
    ),
    Alert(
        "PipelineRLDropsHigh",
        DROPS,
        "sum by (namespace, job, reason) (increase(pipelinerl_groups_dropped_total[30m])) / on "
        "(namespace, job) group_left () "
        f"(sum {BY_JOB} (increase(pipelinerl_groups_dropped_total[30m])) + sum {BY_JOB} "
        "(increase(pipelinerl_groups_trained_total[30m]))) > @dropShare@",
        "15m",
        "{{ $labels.job }} drops many groups: {{ $labels.reason }}",
        "{{ $value | humanizePercentage }} of the groups of {{ $labels.job }} ended untrained "
        "within 30 minutes for one reason, {{ $labels.reason }} (limit @dropShare@).",
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
        threshold="dropShare",
    ),
)
