"""Is it learning, is it healthy?"""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from monitoring.dashboards.page import page
from monitoring.dashboards.panel import (
    PER_SECOND,
    PERCENT,
    SECONDS,
    SHORT,
    TOKENS_S,
    Limit,
    Number,
    Panel,
    newest,
    per_second,
    rows,
)


def _of_sets(series: str, labels: str = "") -> str:
    """By job and set."""
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
        Limit(4, 8),
        decimals=2,
    ),
    Number(
        "ESS",
        "Effective sample size of the newest batch; 1 is on-policy.",
        PERCENT,
        newest("pipelinerl_ess", "min"),
        Limit(0.8, 0.5, below=True),
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
        "Time since an optimizer step ended. Longer than a few steps' time: see who waits for whom "
        "on the page Throughput.",
        SECONDS,
        f"time() - {newest('pipelinerl_last_step_timestamp_seconds')}",
        Limit(900, 3600),
    ),
)

_LEARNING = (
    Panel(
        "Reward and success",
        "Means over each batch: the reward as the task gives it, and the share of solved problems "
        "where the task tells it.",
        SHORT,
        (
            (newest("pipelinerl_reward_mean"), "{{job}} reward"),
            (newest("pipelinerl_success_mean"), "{{job}} success"),
        ),
    ),
    Panel(
        "Loss",
        "The step's loss. Its size says little, its jumps do.",
        SHORT,
        ((newest("pipelinerl_loss"), "{{job}}"),),
    ),
    Panel(
        "Gradient norm",
        "Before clipping. Spikes that come with a low ESS point to staleness, without one to the "
        "learning rate.",
        SHORT,
        ((newest("pipelinerl_grad_norm"), "{{job}}"),),
        low=0,
    ),
    Panel(
        "Entropy and KL to the reference",
        "In nats per token. Entropy near 0 means that the policy has stopped exploring. The KL is "
        "missing without a "
        "reference model.",
        SHORT,
        (
            (newest("pipelinerl_entropy"), "{{job}} entropy"),
            (newest("pipelinerl_kl_ref"), "{{job}} KL"),
        ),
        low=0,
    ),
    Panel(
        "Length of completions",
        "Mean of each batch, in tokens. Length that grows without reward is a loss that favours it.",
        SHORT,
        ((newest("pipelinerl_completion_length_mean"), "{{job}}"),),
        low=0,
    ),
    Panel(
        "Cut off at maxTokens",
        "Share of the batch's trajectories that did not come to their end.",
        PERCENT,
        ((newest("pipelinerl_completion_overflow_ratio"), "{{job}}"),),
        Limit(0.1, 0.3),
        low=0,
        high=1,
    ),
)

_EVALUATION = (
    Panel(
        "Evaluation: pass@k",
        "Chance that one of k answers passes, of the newest evaluated checkpoint, with its 95 % "
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
        "Step of the newest result against the steps done. Far behind: an evaluation takes longer "
        "than everySteps steps, and "
        "steps between are skipped.",
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
        "Steps between sampling and training of a token: mean and largest of each batch. Rising "
        "means that the trainer "
        "is behind or "
        "that weights do not arrive.",
        SHORT,
        (
            (newest("pipelinerl_lag_mean"), "{{job}} mean"),
            (newest("pipelinerl_lag_max"), "{{job}} largest"),
        ),
        Limit(8),
        low=0,
    ),
    Panel(
        "Effective sample size",
        "Share of the batch that is left when importance weights have made up for its age, before "
        "and after truncation.",
        PERCENT,
        (
            (newest("pipelinerl_ess", "min"), "{{job}} raw"),
            (newest("pipelinerl_ess_truncated", "min"), "{{job}} truncated"),
        ),
        Limit(0.5, below=True),
        low=0,
        high=1,
    ),
    Panel(
        "Finished groups that wait for the trainer",
        "Every batch of groups here is one more step of lag; none at all lets the trainer wait.",
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
        Limit(0.3, 0.6),
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
        "Processes started again and weight updates that failed, in the last hour.",
        SHORT,
        (
            (
                "sum by (namespace, job) (increase(pipelinerl_restarts_total{@}[1h]))",
                "{{job}} restarts",
            ),
            (
                "sum by (namespace, job) (increase(pipelinerl_weight_update_failures_total{@}[1h]))",
                "{{job}} failed updates",
            ),
        ),
        Limit(3),
        low=0,
    ),
)
