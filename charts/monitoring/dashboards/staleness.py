"""How old is what is trained, what does it cost, and where does it come from?"""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from monitoring.dashboards.page import page
from monitoring.dashboards.panel import (
    PER_SECOND,
    PERCENT,
    SECONDS,
    SHORT,
    TOKENS_S,
    Heat,
    Limit,
    Panel,
    newest,
    per_second,
    quantile,
    rows,
)


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
        ("What the staleness policy gives up, by layer", _WASTE),
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
        "Mean and largest lag of each batch, and the bound where the staleness policy promises one.",
        SHORT,
        (
            (newest("pipelinerl_lag_mean"), "{{job}} mean"),
            (newest("pipelinerl_lag_max"), "{{job}} largest"),
            (newest("pipelinerl_staleness_bound_steps"), "{{job}} bound"),
        ),
        Limit(8),
        low=0,
        span=12,
    ),
    Panel(
        "Lag of half, of nine in ten, of 99 in 100 tokens",
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
        "Share of the batch that is left when importance weights have made up for its age. A low "
        "raw value with a high "
        "truncated "
        "one says that truncation hides the staleness, at the price of bias.",
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
        "Tokens clipped or truncated",
        "Share of the tokens whose importance ratio was cut.",
        PERCENT,
        ((newest("pipelinerl_clip_fraction"), "{{job}}"),),
        Limit(0.1, 0.3),
        low=0,
    ),
    Panel(
        "Skipped steps",
        "Steps per second that changed nothing because the gradient was not finite.",
        PER_SECOND,
        ((per_second("pipelinerl_skipped_steps_total"), "{{job}}"),),
        Limit(0.001),
        low=0,
    ),
)

_QUEUES = (
    Panel(
        "Groups by stage",
        "All groups between their prompt's grant and the optimizer step. A deep `ready` is a "
        "trainer behind, a deep `stream` a "
        "preprocessor or reference model behind, a deep `running` long sequences.",
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
        "Groups under way and the policy's limit",
        "Groups that are admitted and not yet in a batch, and the most that the staleness policy "
        "lets there be.",
        SHORT,
        (
            (
                'sum by (namespace, job) (pipelinerl_queue_groups{@,stage!="packed"})',
                "{{job}} under way",
            ),
            (newest("pipelinerl_outstanding_limit_groups"), "{{job}} limit"),
        ),
        low=0,
    ),
)

_WASTE = (
    Panel(
        "1. Admission: generation held back",
        "Share of the time in which an actor asked for groups and the staleness policy let none "
        "start. It costs idle "
        "places, no tokens.",
        PERCENT,
        ((per_second("pipelinerl_admission_closed_seconds_total"), "{{job}}"),),
        low=0,
    ),
    Panel(
        "2. and 3. Running and assembly: tokens given up",
        "Sampled tokens per second of groups that were cancelled while they ran, or dropped when a "
        "batch was assembled.",
        TOKENS_S,
        ((per_second("pipelinerl_stale_tokens_total", "layer"), "{{job}} {{layer}}"),),
        low=0,
        stacked=True,
    ),
    Panel(
        "All tokens thrown away, by reason",
        "Sampled tokens per second that were never trained.",
        TOKENS_S,
        ((per_second("pipelinerl_tokens_dropped_total", "reason"), "{{job}} {{reason}}"),),
        low=0,
        stacked=True,
    ),
)
