"""Whether new weights reach the generators, how fast, and at what cost: dashboard and alerts."""

from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard

from monitoring.alert import BY_JOB, Alert, Severity
from monitoring.panel import (
    PER_SECOND,
    SECONDS,
    SHORT,
    Limit,
    Panel,
    newest,
    page,
    per_second,
    rows,
)


def weights() -> Dashboard:
    return rows(
        page(
            "weights",
            "weights",
            "In-flight weight updates: do they arrive, how long do they take, who is in the group.",
        ),
        ("Versions", _VERSIONS),
        ("Time of an update", _TIMES),
        ("The weight-transfer group", _GROUP),
    )


_VERSIONS = (
    Panel(
        "Trained and served version",
        "Optimizer steps done, and the version that the generators serve.",
        SHORT,
        (
            (newest("pipelinerl_policy_version"), "{{job}} trained"),
            (newest("pipelinerl_served_version"), "{{job}} served"),
        ),
        low=0,
    ),
    Panel(
        "Steps behind",
        "How many steps the generators' weights are behind the trainer's. It adds to the lag of "
        "every token.",
        SHORT,
        (
            (
                f"{newest('pipelinerl_policy_version')} - {newest('pipelinerl_served_version')}",
                "{{job}}",
            ),
        ),
        Limit(2, 8),
        low=0,
    ),
    Panel(
        "Generators' versions",
        "Oldest and newest version among the generators: apart only while an update is under way.",
        SHORT,
        (
            (
                'min by (namespace, job) (pipelinerl_weight_version{@,role="generator"})',
                "{{job}} oldest",
            ),
            (
                'max by (namespace, job) (pipelinerl_weight_version{@,role="generator"})',
                "{{job}} newest",
            ),
        ),
    ),
)

_TIMES = (
    Panel(
        "Newest update",
        "From the request to the last generator's answer; of it the broadcast, and putting the "
        "weights in place.",
        SECONDS,
        (
            (newest("pipelinerl_publish_seconds"), "{{job}} whole"),
            (newest("pipelinerl_transfer_seconds"), "{{job}} transfer"),
            (newest("pipelinerl_apply_seconds"), "{{job}} apply"),
        ),
        Limit(60),
        low=0,
    ),
    Panel(
        "Pause of decoding",
        "Time without decoding in the newest update, of the slowest generator.",
        SECONDS,
        ((newest("pipelinerl_pause_seconds"), "{{job}}"),),
        Limit(1, 5),
        low=0,
    ),
    Panel(
        "Time lost to pauses",
        "Share of the generators' time without decoding because of updates.",
        "percentunit",
        (
            (
                "avg by (namespace, job) "
                '(rate(pipelinerl_weight_pause_seconds_sum{@,role="generator"}[$__rate_interval]))',
                "{{job}}",
            ),
        ),
        Limit(0.05, 0.2),
        low=0,
    ),
)

_GROUP = (
    Panel(
        "Updates",
        "Versions published per second, attempts that failed, and updates that the staleness "
        "policy held back until "
        "the deadline.",
        PER_SECOND,
        (
            (per_second("pipelinerl_weight_updates_total"), "{{job}} published"),
            (per_second("pipelinerl_weight_update_failures_total"), "{{job}} failed"),
            (per_second("pipelinerl_publishes_forced_total"), "{{job}} forced"),
        ),
        low=0,
    ),
    Panel(
        "Members",
        "Generators in the group, those that the job should have, and those that do not answer.",
        SHORT,
        (
            (newest("pipelinerl_transfer_group_members"), "{{job}} members"),
            (newest("pipelinerl_generators_expected"), "{{job}} expected"),
            (newest("pipelinerl_generators_absent"), "{{job}} absent"),
        ),
        low=0,
    ),
    Panel(
        "Changes of the group",
        "In the last hour: groups formed, groups that did not form, generators left out after a "
        "fault.",
        SHORT,
        tuple(
            (
                f"sum by (namespace, job) (increase(pipelinerl_{series}_total{{@}}[1h]))",
                f"{{{{job}}}} {label}",
            )
            for series, label in (
                ("transfer_groups_formed", "formed"),
                ("transfer_group_failures", "failed"),
                ("member_expulsions", "expelled"),
            )
        ),
        low=0,
    ),
    Panel(
        "Epoch",
        "Number of the group; it grows whenever its members change.",
        SHORT,
        ((newest("pipelinerl_transfer_group_epoch"), "{{job}}"),),
        low=0,
    ),
)


WEIGHTS: Final = (
    Alert(
        "PipelineRLUpdatesFail",
        Severity.CRITICAL,
        f"sum {BY_JOB} (increase(pipelinerl_weight_update_failures_total[15m])) > @updateFailures@",
        "0m",
        "Weight updates of {{ $labels.job }} fail",
        "{{ $value | humanize }} attempts to send weights to the generators of {{ $labels.job }} "
        "failed within 15 minutes "
        "(limit @updateFailures@).",
        fires={'pipelinerl_weight_update_failures_total{job="sums"}': "0x170 0+1x10"},
        quiet={'pipelinerl_weight_update_failures_total{job="sums"}': "0x170 0 1x9"},
        thresholds={"updateFailures": 3},
    ),
    Alert(
        "PipelineRLUpdateSlow",
        Severity.WARNING,
        f"max {BY_JOB} (pipelinerl_publish_seconds) > @publishSeconds@",
        "10m",
        "Weight updates of {{ $labels.job }} are slow",
        "The newest weight update of {{ $labels.job }} took {{ $value | humanizeDuration }} from "
        "the request to the last "
        "generator's answer (limit @publishSeconds@ s).",
        fires={'pipelinerl_publish_seconds{job="sums"}': "90x180"},
        quiet={'pipelinerl_publish_seconds{job="sums"}': "45x180"},
        thresholds={"publishSeconds": 60},
    ),
    Alert(
        "PipelineRLPauseLong",
        Severity.WARNING,
        f"max {BY_JOB} (pipelinerl_pause_seconds) > @pauseSeconds@",
        "10m",
        "Generators of {{ $labels.job }} stand still during weight updates",
        "The newest weight update of {{ $labels.job }} stopped decoding for {{ $value | "
        "humanizeDuration }} "
        "(limit @pauseSeconds@ s).",
        fires={'pipelinerl_pause_seconds{job="sums"}': "8x180"},
        quiet={'pipelinerl_pause_seconds{job="sums"}': "0.2x180"},
        thresholds={"pauseSeconds": 5},
    ),
    Alert(
        "PipelineRLWeightsBehind",
        Severity.CRITICAL,
        f"max {BY_JOB} (pipelinerl_policy_version) - max {BY_JOB} (pipelinerl_served_version) > "
        "@weightsBehindSteps@",
        "5m",
        "Generators of {{ $labels.job }} sample with old weights",
        "The generators of {{ $labels.job }} serve weights that are {{ $value }} steps behind the "
        "trainer's "
        "(limit @weightsBehindSteps@).",
        fires={
            'pipelinerl_policy_version{job="sums"}': "0+1x180",
            'pipelinerl_served_version{job="sums"}': "0+1x100 100x80",
        },
        quiet={
            'pipelinerl_policy_version{job="sums"}': "1+1x180",
            'pipelinerl_served_version{job="sums"}': "0+1x180",
        },
        thresholds={"weightsBehindSteps": 8},
    ),
    Alert(
        "PipelineRLMemberExpelled",
        Severity.WARNING,
        f"sum {BY_JOB} (increase(pipelinerl_member_expulsions_total[15m])) > 0",
        "0m",
        "A generator of {{ $labels.job }} was left out of the weight-transfer group",
        "{{ $value | humanize }} generators of {{ $labels.job }} were left out of the group after "
        "a fault within 15 minutes.",
        fires={'pipelinerl_member_expulsions_total{job="sums"}': "0x170 1x10"},
        quiet={'pipelinerl_member_expulsions_total{job="sums"}': "1x180"},
    ),
    Alert(
        "PipelineRLGeneratorsAbsent",
        Severity.WARNING,
        f"max {BY_JOB} (pipelinerl_generators_absent) / max {BY_JOB} "
        "(pipelinerl_generators_expected) > @absentShare@",
        "15m",
        "Generators of {{ $labels.job }} do not answer",
        "{{ $value | humanizePercentage }} of the generators of {{ $labels.job }} do not answer "
        "(limit @absentShare@).",
        fires={
            'pipelinerl_generators_absent{job="sums"}': "2x180",
            'pipelinerl_generators_expected{job="sums"}': "8x180",
        },
        quiet={
            'pipelinerl_generators_absent{job="sums"}': "0x180",
            'pipelinerl_generators_expected{job="sums"}': "8x180",
        },
        thresholds={"absentShare": 0.1},
    ),
)
