"""Which process waits for which: the throughput dashboard and its alerts."""

from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard

from monitoring.alert import BY_JOB, Alert, Severity
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
        "are equal but for "
        "what is dropped.",
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
        "Seconds per second of the training thread. Much `wait`: generation is the bottleneck; "
        "none, and a deep queue: "
        "the trainer is.",
        PERCENT,
        ((per_second("pipelinerl_trainer_phase_seconds_total", "phase"), "{{job}} {{phase}}"),),
        low=0,
        stacked=True,
    ),
    Panel(
        "Generation held back",
        "Share of the time in which actors asked for groups and the staleness policy let none "
        "start: the trainer is "
        "the bottleneck, or "
        "the policy too strict.",
        PERCENT,
        ((per_second("pipelinerl_admission_closed_seconds_total"), "{{job}}"),),
        low=0,
    ),
    Panel(
        "Actors",
        "Those that there should be, and those that are ready. With `autoscale` they come and go "
        "while the trainer steps.",
        SHORT,
        (
            (newest("pipelinerl_actors_desired"), "{{job}} desired"),
            (newest("pipelinerl_actors_ready"), "{{job}} ready"),
        ),
        low=0,
    ),
    Panel(
        "Throughput over generation's",
        "What the trainers take of what generation can make, when autoscale last looked. Near 1 "
        "the trainers wait for "
        "samples; far below, generators wait for the trainers.",
        PERCENT,
        ((newest("pipelinerl_autoscale_ratio"), "{{job}}"),),
        low=0,
        high=1,
    ),
)

_GENERATORS = (
    Panel(
        "Batch in progress against H",
        "Sequences that actors have their generators decode, and the most that these take at once. "
        "Far below H: "
        "prompts are missing.",
        SHORT,
        (
            (newest("pipelinerl_requests_running", "sum"), "{{job}} running"),
            (newest("pipelinerl_requests_limit", "sum"), "{{job}} H, all generators"),
        ),
        low=0,
    ),
    Panel(
        "Sequences in the engines",
        "All of them, and those that wait in the engine for a place or for KV blocks.",
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
        Limit(0.9, 0.97),
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
        "Half, and nine in ten, of the turns are no longer than this, in tokens.",
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
        "From its lease to its publication: half, and nine in ten, of the groups take no longer.",
        SECONDS,
        tuple(
            (quantile(share, "pipelinerl_group_seconds"), f"{{{{job}}}} {share:.0%}")
            for share in (0.5, 0.9)
        ),
        low=0,
    ),
    Panel(
        "Time of a verification",
        "Half, and nine in ten, of the verifications take no longer. Long ones hold groups back "
        "while their places are empty.",
        SECONDS,
        tuple(
            (quantile(share, "pipelinerl_verification_seconds"), f"{{{{job}}}} {share:.0%}")
            for share in (0.5, 0.9)
        ),
        Limit(10),
        low=0,
    ),
    Panel(
        "Rollout errors",
        "Requests tried again and trajectories given up per second, by what went wrong.",
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
        "The newest step, and of it waiting for the batch and training.",
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
        Limit(0.8, below=True),
        low=0,
        high=1,
    ),
    Panel(
        "Imbalance of the ranks",
        "(most - fewest) / most tokens of a rank: so much of the time the others wait for the "
        "fullest.",
        PERCENT,
        ((newest("pipelinerl_packing_imbalance"), "{{job}}"),),
        Limit(0.1, 0.3),
        low=0,
    ),
)


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
