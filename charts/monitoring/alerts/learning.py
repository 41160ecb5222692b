"""Is it learning?"""

from typing import Final

from monitoring.alerts.alert import BY_JOB, Alert, Severity

LEARNING: Final = (
    Alert(
        "PipelineRLNoStep",
        Severity.CRITICAL,
        f"time() - max {BY_JOB} (pipelinerl_last_step_timestamp_seconds) > @noStepSeconds@",
        "1m",
        "{{ $labels.job }} has made no optimizer step for too long",
        "The last optimizer step of {{ $labels.job }} ended {{ $value | humanizeDuration }} ago "
        "(limit @noStepSeconds@ s).",
        fires={'pipelinerl_last_step_timestamp_seconds{job="sums"}': "0x180"},
        quiet={'pipelinerl_last_step_timestamp_seconds{job="sums"}': "0+60x180"},
        thresholds={"noStepSeconds": 3600},
    ),
    Alert(
        "PipelineRLNoFirstStep",
        Severity.WARNING,
        f'count {BY_JOB} (pipelinerl_memory_bytes{{role="trainer"}}) '
        f"unless on (namespace, job) max {BY_JOB} (pipelinerl_last_step_timestamp_seconds)",
        "2h",
        "{{ $labels.job }} has not made its first step",
        "{{ $value }} trainer process(es) of {{ $labels.job }} have run for two hours without an "
        "optimizer step.",
        fires={'pipelinerl_memory_bytes{job="sums",role="trainer"}': "1e9x180"},
        quiet={
            'pipelinerl_memory_bytes{job="sums",role="trainer"}': "1e9x180",
            'pipelinerl_last_step_timestamp_seconds{job="sums"}': "_x60 3660+60x119",
        },
    ),
    Alert(
        "PipelineRLRewardCollapsed",
        Severity.CRITICAL,
        f"(max {BY_JOB} (max_over_time(avg_over_time(pipelinerl_reward_mean[15m])[6h:5m])) "
        f"- max {BY_JOB} (avg_over_time(pipelinerl_reward_mean[15m]))) "
        f"/ abs(max {BY_JOB} (max_over_time(avg_over_time(pipelinerl_reward_mean[15m])[6h:5m]))) > "
        "@rewardDropShare@",
        "15m",
        "The reward of {{ $labels.job }} has collapsed",
        "The reward of {{ $labels.job }}, averaged over 15 minutes, is {{ $value | "
        "humanizePercentage }} below its best of the "
        "last 6 hours (limit @rewardDropShare@ of it).",
        fires={'pipelinerl_reward_mean{job="sums"}': "0+0.01x60 0.6x60 0.1x60"},
        quiet={'pipelinerl_reward_mean{job="sums"}': "0+0.01x60 0.6x60 0.4x60"},
        thresholds={"rewardDropShare": 0.5},
    ),
    Alert(
        "PipelineRLNotFinite",
        Severity.CRITICAL,
        f"count {BY_JOB} (pipelinerl_reward_mean != pipelinerl_reward_mean or pipelinerl_loss != "
        "pipelinerl_loss)",
        "2m",
        "Reward or loss of {{ $labels.job }} is not a number",
        "Reward or loss of the newest step of {{ $labels.job }} is not a number, in {{ $value }} "
        "process.",
        fires={
            'pipelinerl_reward_mean{job="sums"}': "0.4x170 NaN NaN NaN NaN NaN",
            'pipelinerl_loss{job="sums"}': "0.1x180",
        },
        quiet={
            'pipelinerl_reward_mean{job="sums"}': "0x180",
            'pipelinerl_loss{job="sums"}': "-0.1x180",
        },
    ),
    Alert(
        "PipelineRLStepsSkipped",
        Severity.WARNING,
        f"sum {BY_JOB} (increase(pipelinerl_skipped_steps_total[15m])) > @skippedSteps@",
        "0m",
        "{{ $labels.job }} skips optimizer steps",
        "{{ $value | humanize }} steps of {{ $labels.job }} within 15 minutes changed nothing "
        "because the gradient was not "
        "finite (limit @skippedSteps@).",
        fires={'pipelinerl_skipped_steps_total{job="sums"}': "0x165 0+1x15"},
        quiet={'pipelinerl_skipped_steps_total{job="sums"}': "0x165 0 1x15"},
        thresholds={"skippedSteps": 3},
    ),
    Alert(
        "PipelineRLCheckpointsFail",
        Severity.CRITICAL,
        f"sum {BY_JOB} (increase(pipelinerl_checkpoint_failures_total[1h])) > 0",
        "0m",
        "{{ $labels.job }} cannot write checkpoints",
        "{{ $value | humanize }} checkpoints of {{ $labels.job }} could not be written within the "
        "last hour: a crash now loses "
        "what came after the last one that could.",
        fires={'pipelinerl_checkpoint_failures_total{job="sums"}': "0x170 1x10"},
        quiet={'pipelinerl_checkpoint_failures_total{job="sums"}': "1x180"},
    ),
)
