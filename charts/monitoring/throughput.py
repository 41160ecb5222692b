"""Dashboard and alerts on throughput: which process waits for which."""

from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard

from monitoring.alert import BY_JOB, Alert
from monitoring.panel import (
    BYTES,
    PER_SECOND,
    PERCENT,
    SECONDS,
    SHORT,
    TOKENS_S,
    Limit,
    Panel,
    newest,
    page,
    per_second,
    quantile,
    rows,
)
from pipelinerl_common.judgements import (
    GROUPS_FAIL,
    KV_CACHE_FULL,
    PACKING_FILL,
    PACKING_IMBALANCE,
    STREAM_FULL,
    TRAINER_STARVED,
    VERIFICATION_SECONDS,
    Severity,
)


def throughput() -> Dashboard:
    return rows(
        page(
            "throughput",
            "throughput",
            "Who waits for whom: generators, environments, the stream, the trainer.",
        ),
        ("The balance", _BALANCE),
        ("Generators", _GENERATORS),
        ("Actors and the stream", _ACTORS),
        ("Trainer", _TRAINER),
    )


_BALANCE = (
    Panel(
        "Tokens per second",
        "Sampled by the generators, received by the preprocessor, trained. In the long run these "
        "are equal except for dropped groups.",
        TOKENS_S,
        (
            (per_second("pipelinerl_tokens_generated_total"), "{{job}} generated"),
            (per_second("pipelinerl_tokens_received_total"), "{{job}} received"),
            (per_second("pipelinerl_tokens_trained_total"), "{{job}} trained"),
        ),
        low=0,
    ),
    Panel(
        "Where the trainer's time goes",
        "Seconds per second of the training thread. Much `wait` means that generation is the "
        "bottleneck; none and a deep queue mean that the trainer is.",
        PERCENT,
        ((per_second("pipelinerl_trainer_phase_seconds_total", "phase"), "{{job}} {{phase}}"),),
        low=0,
        stacked=True,
    ),
    Panel(
        "Generation held back",
        "Share of the time in which actors asked for groups and the staleness policy admitted "
        "none: the trainer is the bottleneck, or the policy is too strict.",
        PERCENT,
        ((per_second("pipelinerl_admission_closed_seconds_total"), "{{job}}"),),
        low=0,
    ),
    Panel(
        "Actors",
        "Desired actors and ready actors. With `autoscale` their number changes while the trainer "
        "runs.",
        SHORT,
        (
            (newest("pipelinerl_actors_desired"), "{{job}} desired"),
            (newest("pipelinerl_actors_ready"), "{{job}} ready"),
        ),
        low=0,
    ),
    Panel(
        "Throughput over generation's",
        "The trainers' throughput over what generation could make, when autoscale last measured "
        "it. Near 1 the trainers wait for samples; far below, generators wait for the trainers.",
        PERCENT,
        ((newest("pipelinerl_autoscale_ratio"), "{{job}}"),),
        low=0,
        high=1,
    ),
)

_GENERATORS = (
    Panel(
        "Batch in progress against H",
        "Sequences that the generators decode, and the largest number that they take (H). Far "
        "below H: prompts are missing.",
        SHORT,
        (
            (newest("pipelinerl_requests_running", "sum"), "{{job}} running"),
            (newest("pipelinerl_requests_limit", "sum"), "{{job}} H, all generators"),
        ),
        low=0,
    ),
    Panel(
        "Sequences in the engines",
        "All sequences, and those that wait in the engine for a place or for KV blocks.",
        SHORT,
        (
            (newest("pipelinerl_sequences_running", "sum"), "{{job}} in the engine"),
            (newest("pipelinerl_sequences_waiting", "sum"), "{{job}} waiting"),
        ),
        low=0,
    ),
    Panel(
        "KV cache in use",
        "Share of the KV cache's blocks, mean and fullest generator. Near 1, sequences are "
        "preempted and computed again.",
        PERCENT,
        (
            (newest("pipelinerl_kv_cache_usage_ratio", "avg"), "{{job}} mean"),
            (newest("pipelinerl_kv_cache_usage_ratio"), "{{job}} fullest"),
        ),
        Limit.of(KV_CACHE_FULL),
        low=0,
        high=1,
    ),
    Panel(
        "Preemptions",
        "Sequences per second that lost their KV blocks to others.",
        PER_SECOND,
        ((per_second("pipelinerl_preemptions_total"), "{{job}}"),),
        Limit(1),
        low=0,
    ),
    Panel(
        "Tokens per generator",
        "Sampled tokens per second of the slowest and the fastest generator.",
        TOKENS_S,
        (
            (
                "min by (namespace, job) "
                "(rate(pipelinerl_sampled_tokens_total{@}[$__rate_interval]))",
                "{{job}} slowest",
            ),
            (
                "max by (namespace, job) "
                "(rate(pipelinerl_sampled_tokens_total{@}[$__rate_interval]))",
                "{{job}} fastest",
            ),
        ),
        low=0,
    ),
    Panel(
        "Length of sampled turns",
        "Median and 90th percentile of the turns' length, in tokens.",
        SHORT,
        tuple(
            (quantile(share, "pipelinerl_completion_tokens"), f"{{{{job}}}} {share:.0%}")
            for share in (0.5, 0.9)
        ),
        low=0,
    ),
)

_ACTORS = (
    Panel(
        "Time of a group",
        "Median and 90th percentile of the time from a group's lease to its publication.",
        SECONDS,
        tuple(
            (quantile(share, "pipelinerl_group_seconds"), f"{{{{job}}}} {share:.0%}")
            for share in (0.5, 0.9)
        ),
        low=0,
    ),
    Panel(
        "Time of a verification",
        "Median and 90th percentile of a verification's time. Long ones delay groups while their "
        "places are empty.",
        SECONDS,
        tuple(
            (quantile(share, "pipelinerl_verification_seconds"), f"{{{{job}}}} {share:.0%}")
            for share in (0.5, 0.9)
        ),
        Limit.at(VERIFICATION_SECONDS),
        low=0,
    ),
    Panel(
        "Rollout errors",
        "Requests retried and trajectories given up per second, by the error.",
        PER_SECOND,
        ((per_second("pipelinerl_rollout_errors_total", "reason"), "{{job}} {{reason}}"),),
        low=0,
        stacked=True,
    ),
    Panel(
        "Groups per second",
        "Published by actors, and trained.",
        PER_SECOND,
        (
            (per_second("pipelinerl_groups_published_total"), "{{job}} published"),
            (per_second("pipelinerl_groups_trained_total"), "{{job}} trained"),
        ),
        low=0,
    ),
    Panel(
        "Sample stream",
        "Bytes on the stream that are not yet trained, and the size at which actors have to wait.",
        BYTES,
        (
            (newest("pipelinerl_stream_bytes"), "{{job}}"),
            (newest("pipelinerl_stream_limit_bytes"), "{{job}} limit"),
        ),
        low=0,
    ),
    Panel(
        "Faults on the stream",
        "Retries, redeliveries, duplicates, losses and reconnects per second.",
        PER_SECOND,
        ((per_second("pipelinerl_stream_events_total", "event"), "{{job}} {{event}}"),),
        low=0,
        stacked=True,
    ),
)

_TRAINER = (
    Panel(
        "Time of a step",
        "The newest step, and its parts: waiting for the batch, and training.",
        SECONDS,
        (
            (newest("pipelinerl_step_seconds"), "{{job}} step"),
            (newest("pipelinerl_wait_seconds"), "{{job}} waiting"),
            (newest("pipelinerl_train_seconds"), "{{job}} training"),
        ),
        low=0,
    ),
    Panel(
        "Packing fill",
        "Share of the micro-batches' slots that hold a token.",
        PERCENT,
        ((newest("pipelinerl_packing_fill", "min"), "{{job}}"),),
        Limit.at(PACKING_FILL),
        low=0,
        high=1,
    ),
    Panel(
        "Imbalance of the ranks",
        "(most - fewest) / most tokens of a rank: the share of the time that ranks wait for the "
        "fullest one.",
        PERCENT,
        ((newest("pipelinerl_packing_imbalance"), "{{job}}"),),
        Limit.of(PACKING_IMBALANCE),
        low=0,
    ),
)


THROUGHPUT: Final = (
    Alert(
        "PipelineRLTrainerStarved",
        TRAINER_STARVED,
        f'max {BY_JOB} (rate(pipelinerl_trainer_phase_seconds_total{{phase="wait"}}[10m])) > '
        "@waitShare@",
        "20m",
        "The trainer of {{ $labels.job }} waits for samples",
        "The trainer of {{ $labels.job }} spends {{ $value | humanizePercentage }} of its time "
        "waiting for a batch (limit @waitShare@).",
        fires={'pipelinerl_trainer_phase_seconds_total{job="sums",phase="wait"}': "0+48x180"},
        quiet={'pipelinerl_trainer_phase_seconds_total{job="sums",phase="wait"}': "0+24x180"},
        threshold="waitShare",
    ),
    Alert(
        "PipelineRLGenerationStopped",
        Severity.CRITICAL,
        f"sum {BY_JOB} (rate(pipelinerl_tokens_generated_total[10m])) == 0 and on (namespace, job) "
        f"sum {BY_JOB} "
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
        GROUPS_FAIL,
        f"sum {BY_JOB} (increase(pipelinerl_groups_failed_total[30m])) / (sum {BY_JOB} "
        f"(increase(pipelinerl_groups_failed_total[30m])) + sum {BY_JOB} "
        "(increase(pipelinerl_groups_published_total[30m]))) > @failedShare@",
        "15m",
        "Rollouts of {{ $labels.job }} fail",
        "{{ $value | humanizePercentage }} of the groups of {{ $labels.job }} were given up by "
        "their actors within 30 minutes (limit @failedShare@).",
        fires={
            'pipelinerl_groups_failed_total{job="sums"}': "0+1x180",
            'pipelinerl_groups_published_total{job="sums"}': "0+2x180",
        },
        quiet={
            'pipelinerl_groups_failed_total{job="sums"}': "0+1x180",
            'pipelinerl_groups_published_total{job="sums"}': "0+20x180",
        },
        threshold="failedShare",
    ),
    Alert(
        "PipelineRLStreamNearLimit",
        STREAM_FULL,
        f"max {BY_JOB} (pipelinerl_stream_bytes) / max {BY_JOB} (pipelinerl_stream_limit_bytes) > "
        "@streamShare@",
        "5m",
        "The sample stream of {{ $labels.job }} is nearly full",
        "The sample stream of {{ $labels.job }} has used {{ $value | humanizePercentage }} of its "
        "bytes (limit @streamShare@).",
        fires={
            'pipelinerl_stream_bytes{job="sums"}': "9e9x180",
            'pipelinerl_stream_limit_bytes{job="sums"}': "1e10x180",
        },
        quiet={
            'pipelinerl_stream_bytes{job="sums"}': "7e9x180",
            'pipelinerl_stream_limit_bytes{job="sums"}': "1e10x180",
        },
        threshold="streamShare",
    ),
)
