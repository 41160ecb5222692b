"""The overview dashboard, on learning and health, and the alerts on learning."""

from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard

from monitoring.alert import BY_JOB, Alert
from monitoring.panel import (
    PER_SECOND,
    PERCENT,
    SECONDS,
    SHORT,
    TOKENS_S,
    Limit,
    Number,
    Panel,
    newest,
    page,
    per_second,
    rows,
)
from pipelinerl_common.judgements import (
    CHECKPOINTS_FAIL,
    COMPLETIONS_CUT_OFF,
    ESS,
    LAG,
    NO_STEP,
    RESTARTS,
    REWARD_COLLAPSED,
    STEPS_SKIPPED,
    TRAINER_STARVED,
    Severity,
)


def _of_sets(series: str, labels: str = "") -> str:
    """A series by job and evaluation set."""
    return f"max by (namespace, job, set{', ' + labels if labels else ''}) ({series}{{@}})"


def overview() -> Dashboard:
    return rows(
        page(
            "overview",
            "overview",
            "Is it learning, is it healthy? The first page to look at, for all jobs or for some.",
        ),
        ("Now", (*_NOW,)),
        ("Is it learning?", _LEARNING),
        ("Is it good on its evaluation sets?", _EVALUATION),
        ("Is it healthy?", _HEALTHY),
    )


_NOW = (
    Number(
        "Step",
        "Optimizer steps done: the version of the newest weights.",
        SHORT,
        newest("pipelinerl_policy_version"),
        decimals=0,
    ),
    Number(
        "Reward",
        "Mean reward of the newest batch.",
        SHORT,
        newest("pipelinerl_reward_mean"),
        decimals=3,
    ),
    Number(
        "Lag",
        "Mean age of the newest batch's tokens, in steps.",
        SHORT,
        newest("pipelinerl_lag_mean"),
        Limit.of(LAG),
        decimals=2,
    ),
    Number(
        "ESS",
        "Effective sample size of the newest batch; 1 is on-policy.",
        PERCENT,
        newest("pipelinerl_ess", "min"),
        Limit.of(ESS),
        decimals=1,
    ),
    Number(
        "Generated",
        "Sampled tokens per second, all generators.",
        TOKENS_S,
        per_second("pipelinerl_tokens_generated_total"),
    ),
    Number(
        "Since the last step",
        "Time since an optimizer step ended. Longer than a few steps take: the page Throughput "
        "shows which process waits for which.",
        SECONDS,
        f"time() - {newest('pipelinerl_last_step_timestamp_seconds')}",
        Limit.of(NO_STEP),
    ),
)

_LEARNING = (
    Panel(
        "Reward and success",
        "Means over each batch: the task's reward, and the share of solved problems where the task "
        "reports it.",
        SHORT,
        (
            (newest("pipelinerl_reward_mean"), "{{job}} reward"),
            (newest("pipelinerl_success_mean"), "{{job}} success"),
        ),
    ),
    Panel(
        "Loss",
        "The step's loss. Jumps matter, its size says little.",
        SHORT,
        ((newest("pipelinerl_loss"), "{{job}}"),),
    ),
    Panel(
        "Gradient norm",
        "Before clipping. Spikes with a low ESS point to staleness, without one to the learning "
        "rate.",
        SHORT,
        ((newest("pipelinerl_grad_norm"), "{{job}}"),),
        low=0,
    ),
    Panel(
        "Entropy and KL to the reference",
        "In nats per token. Entropy near 0 means that the policy has stopped exploring. The KL is "
        "missing without a reference model.",
        SHORT,
        (
            (newest("pipelinerl_entropy"), "{{job}} entropy"),
            (newest("pipelinerl_kl_ref"), "{{job}} KL"),
        ),
        low=0,
    ),
    Panel(
        "Length of completions",
        "Mean of each batch, in tokens. Length that grows without reward means that the loss "
        "favours it.",
        SHORT,
        ((newest("pipelinerl_completion_length_mean"), "{{job}}"),),
        low=0,
    ),
    Panel(
        "Cut off at maxTokens",
        "Share of the batch's trajectories that were not finished.",
        PERCENT,
        ((newest("pipelinerl_completion_overflow_ratio"), "{{job}}"),),
        Limit.of(COMPLETIONS_CUT_OFF),
        low=0,
        high=1,
    ),
)

_EVALUATION = (
    Panel(
        "Evaluation: pass@k",
        "Chance that one of k answers of the newest evaluated checkpoint passes, with its 95 % "
        "interval over prompts.",
        PERCENT,
        (
            (_of_sets("pipelinerl_evaluation_pass_ratio", "k"), "{{job}} {{set}} pass@{{k}}"),
            (
                _of_sets("pipelinerl_evaluation_pass_ratio_low", "k"),
                "{{job}} {{set}} pass@{{k}} at least",
            ),
            (
                _of_sets("pipelinerl_evaluation_pass_ratio_high", "k"),
                "{{job}} {{set}} pass@{{k}} at most",
            ),
        ),
        low=0,
        high=1,
    ),
    Panel(
        "Evaluation: reward",
        "Mean reward of the newest evaluated checkpoint by set, with its 95 % interval.",
        SHORT,
        (
            (_of_sets("pipelinerl_evaluation_reward_mean"), "{{job}} {{set}}"),
            (_of_sets("pipelinerl_evaluation_reward_low"), "{{job}} {{set}} at least"),
            (_of_sets("pipelinerl_evaluation_reward_high"), "{{job}} {{set}} at most"),
        ),
    ),
    Panel(
        "Evaluated step",
        "Step of the newest result, and the steps done. Far behind: an evaluation takes longer "
        "than everySteps steps, and the steps between are skipped.",
        SHORT,
        (
            (newest("pipelinerl_policy_version"), "{{job}} trained"),
            (newest("pipelinerl_evaluated_step"), "{{job}} evaluated"),
            (
                "sum by (namespace, job) (pipelinerl_evaluations_skipped_total{@})",
                "{{job}} skipped",
            ),
            (
                'sum by (namespace, job) (pipelinerl_evaluations_total{@,outcome="failed"})',
                "{{job}} failed",
            ),
        ),
        low=0,
    ),
)

_HEALTHY = (
    Panel(
        "Lag of the newest batch",
        "Steps between sampling and training of a token: mean and largest of each batch. It rises "
        "when the trainer is behind or when weights do not arrive.",
        SHORT,
        (
            (newest("pipelinerl_lag_mean"), "{{job}} mean"),
            (newest("pipelinerl_lag_max"), "{{job}} largest"),
        ),
        Limit.at(LAG),
        low=0,
    ),
    Panel(
        "Effective sample size",
        "Share of the batch that counts after importance weights correct for its age, before and "
        "after truncation.",
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
        "Finished groups that wait for the trainer",
        "Every batch of groups here adds a step of lag; when there is none the trainer waits.",
        SHORT,
        (('sum by (namespace, job) (pipelinerl_queue_groups{@,stage="ready"})', "{{job}}"),),
        low=0,
    ),
    Panel(
        "Trainer waits",
        "Share of the training thread's time spent waiting for a batch.",
        PERCENT,
        (
            (
                "max by (namespace, job) "
                '(rate(pipelinerl_trainer_phase_seconds_total{@,phase="wait"}[$__rate_interval]))',
                "{{job}}",
            ),
        ),
        Limit.of(TRAINER_STARVED),
        low=0,
        high=1,
    ),
    Panel(
        "Groups dropped",
        "Groups per second that ended untrained, by reason.",
        PER_SECOND,
        ((per_second("pipelinerl_groups_dropped_total", "reason"), "{{job}} {{reason}}"),),
        low=0,
        stacked=True,
    ),
    Panel(
        "Restarts and failed updates",
        "Processes restarted and weight updates that failed in the last hour.",
        SHORT,
        (
            (
                "sum by (namespace, job) (increase(pipelinerl_restarts_total{@}[1h]))",
                "{{job}} restarts",
            ),
            (
                "sum by (namespace, job) "
                "(increase(pipelinerl_weight_update_failures_total{@}[1h]))",
                "{{job}} failed updates",
            ),
        ),
        Limit.at(RESTARTS),
        low=0,
    ),
)


LEARNING: Final = (
    Alert(
        "PipelineRLNoStep",
        NO_STEP,
        f"time() - max {BY_JOB} (pipelinerl_last_step_timestamp_seconds) > @noStepSeconds@",
        "1m",
        "{{ $labels.job }} has made no optimizer step for too long",
        "The last optimizer step of {{ $labels.job }} ended {{ $value | humanizeDuration }} ago "
        "(limit @noStepSeconds@ s).",
        fires={'pipelinerl_last_step_timestamp_seconds{job="sums"}': "0x180"},
        quiet={'pipelinerl_last_step_timestamp_seconds{job="sums"}': "0+60x180"},
        threshold="noStepSeconds",
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
        REWARD_COLLAPSED,
        f"(max {BY_JOB} (max_over_time(avg_over_time(pipelinerl_reward_mean[15m])[6h:5m])) - max "
        f"{BY_JOB} (avg_over_time(pipelinerl_reward_mean[15m]))) / abs(max {BY_JOB} "
        "(max_over_time(avg_over_time(pipelinerl_reward_mean[15m])[6h:5m]))) > "
        "@rewardDropShare@",
        "15m",
        "The reward of {{ $labels.job }} has collapsed",
        "The reward of {{ $labels.job }}, averaged over 15 minutes, is {{ $value | "
        "humanizePercentage }} below its best of the last 6 hours (limit @rewardDropShare@).",
        fires={'pipelinerl_reward_mean{job="sums"}': "0+0.01x60 0.6x60 0.1x60"},
        quiet={'pipelinerl_reward_mean{job="sums"}': "0+0.01x60 0.6x60 0.4x60"},
        threshold="rewardDropShare",
    ),
    Alert(
        "PipelineRLNotFinite",
        Severity.CRITICAL,
        f"count {BY_JOB} (pipelinerl_reward_mean != pipelinerl_reward_mean or pipelinerl_loss != "
        "pipelinerl_loss)",
        "2m",
        "Reward or loss of {{ $labels.job }} is not a number",
        "Reward or loss of the newest step of {{ $labels.job }} is not a number, in {{ $value }} "
        "process(es).",
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
        STEPS_SKIPPED,
        f"sum {BY_JOB} (increase(pipelinerl_skipped_steps_total[15m])) > @skippedSteps@",
        "0m",
        "{{ $labels.job }} skips optimizer steps",
        "{{ $value | humanize }} steps of {{ $labels.job }} within 15 minutes were skipped (limit "
        "@skippedSteps@).",
        fires={'pipelinerl_skipped_steps_total{job="sums"}': "0x165 0+1x15"},
        quiet={'pipelinerl_skipped_steps_total{job="sums"}': "0x165 0 1x15"},
        threshold="skippedSteps",
    ),
    Alert(
        "PipelineRLCheckpointsFail",
        CHECKPOINTS_FAIL,
        f"sum {BY_JOB} (increase(pipelinerl_checkpoint_failures_total[1h])) > 0",
        "0m",
        "{{ $labels.job }} cannot write checkpoints",
        "{{ $value | humanize }} checkpoints of {{ $labels.job }} could not be written within the "
        "last hour.",
        fires={'pipelinerl_checkpoint_failures_total{job="sums"}': "0x170 1x10"},
        quiet={'pipelinerl_checkpoint_failures_total{job="sums"}': "1x180"},
    ),
)
