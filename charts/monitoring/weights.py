"""Dashboard and alerts on weight updates: whether they arrive, how fast, and at what cost."""

from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard

from monitoring.alert import BY_JOB, Alert
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
from pipelinerl_common.judgements import (
    GENERATORS_ABSENT,
    PAUSE_SECONDS,
    PAUSE_SHARE,
    UPDATE_SECONDS,
    UPDATES_KEEP_FAILING,
    WEIGHTS_BEHIND,
    Severity,
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
        "Steps that the generators' weights are behind the trainer's. They add to the lag of every "
        "token.",
        SHORT,
        (
            (
                f"{newest('pipelinerl_policy_version')} - {newest('pipelinerl_served_version')}",
                "{{job}}",
            ),
        ),
        Limit.of(WEIGHTS_BEHIND),
        low=0,
    ),
    Panel(
        "Generators' versions",
        "Oldest and newest version among the generators: they differ only during an update.",
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
        "Time from the request to the last generator's response, and its parts: the transfer, and "
        "applying the weights.",
        SECONDS,
        (
            (newest("pipelinerl_publish_seconds"), "{{job}} whole"),
            (newest("pipelinerl_transfer_seconds"), "{{job}} transfer"),
            (newest("pipelinerl_apply_seconds"), "{{job}} apply"),
        ),
        Limit.at(UPDATE_SECONDS),
        low=0,
    ),
    Panel(
        "Pause of decoding",
        "Time without decoding in the newest update, of the slowest generator.",
        SECONDS,
        ((newest("pipelinerl_pause_seconds"), "{{job}}"),),
        Limit.of(PAUSE_SECONDS),
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
        Limit.of(PAUSE_SHARE),
        low=0,
    ),
)

_GROUP = (
    Panel(
        "Updates",
        "Versions published per second, attempts that failed, and updates that the staleness "
        "policy delayed until the deadline.",
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
        "Generators in the group, generators that the job should have, and generators that do not "
        "respond.",
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
        "In the last hour: groups formed, groups that could not be formed, generators expelled "
        "after a fault.",
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
        "Number of the group; it increases whenever the members change.",
        SHORT,
        ((newest("pipelinerl_transfer_group_epoch"), "{{job}}"),),
        low=0,
    ),
)


WEIGHTS: Final = (
    Alert(
        "PipelineRLUpdatesFail",
        UPDATES_KEEP_FAILING,
        f"sum {BY_JOB} (increase(pipelinerl_weight_update_failures_total[15m])) > @updateFailures@",
        "0m",
        "Weight updates of {{ $labels.job }} fail",
        "{{ $value | humanize }} attempts to send weights to the generators of {{ $labels.job }} "
        "failed within 15 minutes (limit @updateFailures@).",
        fires={'pipelinerl_weight_update_failures_total{job="sums"}': "0x170 0+1x10"},
        quiet={'pipelinerl_weight_update_failures_total{job="sums"}': "0x170 0 1x9"},
        threshold="updateFailures",
    ),
    Alert(
        "PipelineRLUpdateSlow",
        UPDATE_SECONDS,
        f"max {BY_JOB} (pipelinerl_publish_seconds) > @publishSeconds@",
        "10m",
        "Weight updates of {{ $labels.job }} are slow",
        "The newest weight update of {{ $labels.job }} took {{ $value | humanizeDuration }} from "
        "the request to the last generator's response (limit @publishSeconds@ s).",
        fires={'pipelinerl_publish_seconds{job="sums"}': "90x180"},
        quiet={'pipelinerl_publish_seconds{job="sums"}': "45x180"},
        threshold="publishSeconds",
    ),
    Alert(
        "PipelineRLPauseLong",
        PAUSE_SECONDS,
        f"max {BY_JOB} (pipelinerl_pause_seconds) > @pauseSeconds@",
        "10m",
        "Weight updates of {{ $labels.job }} pause decoding for long",
        "The newest weight update of {{ $labels.job }} stopped decoding for {{ $value | "
        "humanizeDuration }} (limit @pauseSeconds@ s).",
        fires={'pipelinerl_pause_seconds{job="sums"}': "8x180"},
        quiet={'pipelinerl_pause_seconds{job="sums"}': "0.2x180"},
        threshold="pauseSeconds",
    ),
    Alert(
        "PipelineRLWeightsBehind",
        WEIGHTS_BEHIND,
        f"max {BY_JOB} (pipelinerl_policy_version) - max {BY_JOB} (pipelinerl_served_version) > "
        "@weightsBehindSteps@",
        "5m",
        "Generators of {{ $labels.job }} sample with old weights",
        "The generators of {{ $labels.job }} serve weights that are {{ $value }} steps behind the "
        "trainer's (limit @weightsBehindSteps@).",
        fires={
            'pipelinerl_policy_version{job="sums"}': "0+1x180",
            'pipelinerl_served_version{job="sums"}': "0+1x100 100x80",
        },
        quiet={
            'pipelinerl_policy_version{job="sums"}': "1+1x180",
            'pipelinerl_served_version{job="sums"}': "0+1x180",
        },
        threshold="weightsBehindSteps",
    ),
    Alert(
        "PipelineRLMemberExpelled",
        Severity.WARNING,
        f"sum {BY_JOB} (increase(pipelinerl_member_expulsions_total[15m])) > 0",
        "0m",
        "A generator of {{ $labels.job }} was expelled from the weight-transfer group",
        "{{ $value | humanize }} generators of {{ $labels.job }} were expelled from the group "
        "after a fault within 15 minutes.",
        fires={'pipelinerl_member_expulsions_total{job="sums"}': "0x170 1x10"},
        quiet={'pipelinerl_member_expulsions_total{job="sums"}': "1x180"},
    ),
    Alert(
        "PipelineRLGeneratorsAbsent",
        GENERATORS_ABSENT,
        f"max {BY_JOB} (pipelinerl_generators_absent) / max {BY_JOB} "
        "(pipelinerl_generators_expected) > @absentShare@",
        "15m",
        "Generators of {{ $labels.job }} do not respond",
        "{{ $value | humanizePercentage }} of the generators of {{ $labels.job }} do not respond "
        "(limit @absentShare@).",
        fires={
            'pipelinerl_generators_absent{job="sums"}': "2x180",
            'pipelinerl_generators_expected{job="sums"}': "8x180",
        },
        quiet={
            'pipelinerl_generators_absent{job="sums"}': "0x180",
            'pipelinerl_generators_expected{job="sums"}': "8x180",
        },
        threshold="absentShare",
    ),
)
