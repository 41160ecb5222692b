"""Do new weights reach the generators?"""

from typing import Final

from monitoring.alerts.alert import BY_JOB, Alert, Severity

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
