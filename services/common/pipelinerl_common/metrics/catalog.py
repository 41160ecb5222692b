"""All metrics of the project: what is learned, and from which samples. The other tables are in
`serving_catalog`.

A new metric is one row in one of the tables; docs/pages/reference/metrics.md is generated from
them.
"""

from collections.abc import Mapping
from typing import Final

from pipelinerl_common.metrics.metric import (
    ACTOR,
    EVALUATOR,
    PREPROCESSOR,
    TRAINER,
    Metric,
    counter,
    exported_by,
    gauge,
    histogram,
)
from pipelinerl_common.metrics.serving_catalog import (
    GENERATION,
    OPERATOR_METRICS,
    PROCESSES,
    WEIGHTS,
)

STAGES: Final = ("admitted", "running", "stream", "ready", "packed")
"""Stages of a group, in order: leased or to be leased again; decoded; on the stream or being
checked and scored; waiting for a batch; in the batch that is trained.
"""

LAYERS: Final = ("running", "assembly")
"""Layers of the staleness policy beyond admission: it cancels a running group; it drops a finished
one when a batch is assembled.
"""

DROP_REASONS: Final = (
    "rollback",
    "unknown",
    "duplicate",
    "mismatch",
    "temperature",
    "non_finite",
    "bad_version",
    "too_few_samples",
    "zero_advantage",
    "no_tokens",
    "reference",
    "ring_buffer",
    "stale",
    "cancelled",
    "unfinished",
    "expired",
    "failed",
)

_STREAM_EVENTS: Final = (
    "retries",
    "redelivered",
    "duplicates",
    "lost",
    "reconnects",
    "metrics_dropped",
    "metrics_malformed",
)

LEDGER: Final[tuple[Metric, ...]] = (
    *exported_by(
        (PREPROCESSOR,),
        gauge(
            "queue_groups",
            "groups",
            "Groups in a stage between their prompt's grant and the optimizer step.",
            {"stage": STAGES},
        ),
        gauge(
            "queue_oldest_seconds",
            "seconds",
            "How long the oldest group of a stage has been in it; 0 when empty.",
            {"stage": STAGES},
        ),
        gauge(
            "outstanding_limit_groups",
            "groups",
            "Most groups that the staleness policy lets be admitted and not yet in a batch.",
        ),
        gauge(
            "stream_messages",
            "messages",
            "Messages on the sample stream that are not acknowledged: all that was published and "
            "not yet trained or dropped.",
        ),
        gauge("stream_bytes", "bytes", "Size of the sample stream."),
        gauge(
            "stream_limit_bytes", "bytes", "Size at which publishing to the sample stream waits."
        ),
        counter(
            "leases_granted_total",
            "leases",
            "Leases of groups given to actors, repeated attempts included.",
        ),
        counter(
            "admission_closed_seconds_total",
            "seconds",
            "Time during which an actor asked for groups and the staleness policy let none start: "
            "its first layer, admission.",
        ),
        counter("tokens_received_total", "tokens", "Sampled tokens that came from the stream."),
        counter("groups_trained_total", "groups", "Groups whose optimizer step is committed."),
        counter(
            "groups_dropped_total",
            "groups",
            "Groups that ended untrained.",
            {"reason": DROP_REASONS},
        ),
        counter(
            "samples_dropped_total",
            "samples",
            "Finished trajectories of groups that ended untrained.",
            {"reason": DROP_REASONS},
        ),
        counter(
            "tokens_dropped_total",
            "tokens",
            "Sampled tokens that were thrown away, those of unfinished groups included.",
            {"reason": DROP_REASONS},
        ),
        counter(
            "stale_groups_total",
            "groups",
            "Groups that the staleness policy gave up, by its layer.",
            {"layer": LAYERS},
        ),
        counter(
            "stale_tokens_total", "tokens", "Sampled tokens of such groups.", {"layer": LAYERS}
        ),
        histogram(
            "staleness_steps",
            "steps",
            "Trained groups by staleness: the step minus the version of the oldest sampled token.",
            (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32),
        ),
        gauge(
            "staleness_bound_steps",
            "steps",
            "Largest staleness of a trained group that the staleness policy promises; missing "
            "without a promise.",
        ),
        counter(
            "sequences_masked_total",
            "samples",
            "Trajectories cut off at maxTokens and therefore not trained.",
        ),
        counter(
            "sequences_overlong_total",
            "samples",
            "Trajectories longer than the model or a micro-batch takes, and therefore not trained.",
        ),
        counter(
            "publishes_forced_total",
            "updates",
            "Weights that the staleness policy held back until the deadline and that went out all "
            "the same.",
        ),
    ),
    *exported_by(
        (ACTOR, PREPROCESSOR),
        counter(
            "stream_events_total",
            "events",
            "Faults on the way to and from the stream's server.",
            {"event": _STREAM_EVENTS},
        ),
    ),
    *exported_by(
        (PREPROCESSOR,),
        counter(
            "stream_set_aside_total",
            "messages",
            "Messages moved to the dead-letter subject, by what was wrong with them.",
            {"reason": ()},
        ),
    ),
)


MAX_LAG_BUCKET: Final = 15

PHASES: Final = ("wait", "train", "commit", "publish", "checkpoint")
"""Phases of the training thread: waiting for the batch; forward, backward and optimizer; committing
the step to the preprocessor; handing the weights over; writing a checkpoint.
"""

LEARNING: Final[tuple[Metric, ...]] = (
    *exported_by(
        (TRAINER,),
        gauge(
            "policy_version",
            "steps",
            "Optimizer steps done, which is the version of the newest weights.",
        ),
        counter("optimizer_steps_total", "steps", "Optimizer steps done by this process."),
        gauge(
            "last_step_timestamp_seconds",
            "seconds",
            "When the newest step ended, in seconds since 1970.",
        ),
        counter(
            "skipped_steps_total",
            "steps",
            "Steps that changed nothing because the gradient was not finite.",
        ),
        gauge(
            "non_finite_micro_batches", "micro-batches", "Micro-batches whose loss was not finite."
        ),
        counter(
            "checkpoint_failures_total", "checkpoints", "Checkpoints that could not be written."
        ),
        histogram(
            "lag_steps",
            "steps",
            "Trained tokens by lag: the version that trained them minus the version that sampled "
            "them.",
            tuple(float(lag) for lag in range(MAX_LAG_BUCKET + 1)),
            records_buckets=True,
        ),
        gauge("lag_mean", "steps", "Mean lag of the batch's tokens."),
        gauge("lag_max", "steps", "Largest lag of a token in the batch."),
        gauge(
            "ess",
            "ratio",
            "Effective sample size of the batch's importance weights before truncation; 1 is "
            "on-policy.",
        ),
        gauge("ess_truncated", "ratio", "The same after truncation or clipping."),
        gauge(
            "reward_mean", "reward", "Mean reward of the batch's trajectories, as the task gave it."
        ),
        gauge(
            "success_mean",
            "ratio",
            "Mean of the task's success metric; missing where the task has none.",
        ),
        gauge(
            "completion_length_mean",
            "tokens",
            "Mean number of sampled tokens of the batch's trajectories.",
        ),
        gauge(
            "completion_overflow_ratio",
            "ratio",
            "Share of the batch's trajectories that were cut off at maxTokens.",
        ),
        gauge("num_sequences", "samples", "Trajectories in the batch."),
        gauge("num_trained_tokens", "tokens", "Tokens with a loss in the batch."),
        counter("samples_trained_total", "samples", "Trajectories trained by this process."),
        counter("tokens_trained_total", "tokens", "Tokens trained by this process."),
        gauge("loss", "loss", "The step's loss."),
        gauge(
            "grad_norm",
            "norm",
            "Norm of the gradient before clipping; missing for a step that was skipped.",
        ),
        gauge("entropy", "nats", "Mean entropy of the policy over the batch's tokens."),
        gauge("kl_ref", "nats", "Mean KL estimate to the reference model; missing without one."),
        gauge(
            "kl_behavior",
            "nats",
            "Mean KL estimate from the policies that sampled the tokens to the trained one.",
        ),
        gauge(
            "ratio_mean",
            "ratio",
            "Mean importance weight of the batch's tokens before any bound; near 1 when all is "
            "well.",
        ),
        gauge("ratio_max", "ratio", "Largest importance weight of a token before any bound."),
        gauge(
            "clip_fraction",
            "ratio",
            "Share of the tokens whose weight was clipped, truncated or masked.",
        ),
        gauge(
            "value_error",
            "reward",
            "Half the mean squared error of the value head; missing without one.",
        ),
        gauge("learning_rate", "rate", "The step's learning rate."),
        gauge("packing_fill", "ratio", "Share of the micro-batches' slots that hold a token."),
        gauge("packing_imbalance", "ratio", "(most - fewest) / most tokens of a rank."),
        gauge("step_seconds", "seconds", "Duration of the step, all phases."),
        gauge("wait_seconds", "seconds", "Of it, waiting for the batch."),
        gauge("train_seconds", "seconds", "Of it, forward, backward and optimizer."),
        counter(
            "trainer_phase_seconds_total",
            "seconds",
            "Time of the training thread by what it did.",
            {"phase": PHASES},
        ),
    ),
)


_SET: Final = {"set": ()}
_SET_K: Final = {"set": (), "k": ()}

OUTCOMES: Final = ("done", "failed")
SKIPS: Final = ("overtaken", "removed")
"""Why a due step was not evaluated: a newer one was due when there was room; the checkpoint was
removed before it could be pinned.
"""

EVALUATION: Final[tuple[Metric, ...]] = (
    *exported_by(
        (EVALUATOR,),
        gauge(
            "evaluated_step",
            "steps",
            "Optimizer steps behind the weights of the newest result; missing before the first.",
        ),
        gauge(
            "evaluation_pass_ratio",
            "ratio",
            "pass@k: chance that one of k answers passes, mean over a set's prompts.",
            _SET_K,
        ),
        gauge("evaluation_pass_ratio_low", "ratio", "Lower end of its 95 % interval.", _SET_K),
        gauge("evaluation_pass_ratio_high", "ratio", "Upper end of its 95 % interval.", _SET_K),
        gauge("evaluation_reward_mean", "reward", "Mean reward over a set's prompts.", _SET),
        gauge("evaluation_reward_low", "reward", "Lower end of its 95 % interval.", _SET),
        gauge("evaluation_reward_high", "reward", "Upper end of its 95 % interval.", _SET),
        gauge(
            "evaluation_tokens_mean",
            "tokens",
            "Mean number of sampled tokens of a set's answers.",
            _SET,
        ),
        gauge(
            "evaluation_truncated_ratio",
            "ratio",
            "Share of a set's answers that were cut off at maxTokens.",
            _SET,
        ),
        gauge(
            "evaluation_prompts",
            "prompts",
            "Prompts of a set that the newest result rests on.",
            _SET,
        ),
        gauge(
            "evaluation_sets_failed", "sets", "Sets of the newest evaluation that have no result."
        ),
        gauge(
            "evaluation_seconds",
            "seconds",
            "Duration of the newest evaluation, its generator's start included.",
        ),
        gauge(
            "evaluation_running_step",
            "steps",
            "Step whose weights are being evaluated; -1 while none are.",
        ),
        gauge(
            "evaluation_prompts_done",
            "prompts",
            "Prompts of a set that the running evaluation is through with.",
            _SET,
        ),
        gauge("evaluation_prompts_planned", "prompts", "Prompts of a set.", _SET),
        counter(
            "evaluations_total",
            "evaluations",
            "Evaluations that ended; failed: a set has no result.",
            {"outcome": OUTCOMES},
        ),
        counter(
            "evaluations_skipped_total",
            "steps",
            "Due steps that were not evaluated, by the reason.",
            {"reason": SKIPS},
        ),
        counter(
            "evaluation_prompts_failed_total",
            "prompts",
            "Prompts that are in no estimate since they failed, by set and reason.",
            {"set": (), "reason": ()},
        ),
    ),
)


TABLES: Final[Mapping[str, tuple[Metric, ...]]] = {
    "Learning": LEARNING,
    "Queues, staleness and drops": LEDGER,
    "Generation": GENERATION,
    "Weight updates": WEIGHTS,
    "Evaluation": EVALUATION,
    "Processes": PROCESSES,
    "Operator": OPERATOR_METRICS,
}
"""Tables by their section of the documentation."""

CATALOG: Final[Mapping[str, Metric]] = {
    metric.name: metric for table in TABLES.values() for metric in table
}
"""Metrics by name, without `pipelinerl_`."""


def metrics_of(role: str) -> tuple[Metric, ...]:
    """The metrics that processes of `role` export."""
    return tuple(metric for metric in CATALOG.values() if role in metric.roles)
