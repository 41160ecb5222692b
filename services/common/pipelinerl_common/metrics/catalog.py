"""The preprocessor's: where groups are, how old they get, and what becomes of them.

The trainer's, from rank 0 for all ranks. Gauges are of the newest step.

The evaluator's: how good checkpoints are on the job's evaluation sets. Gauges of results are of
the newest evaluation.

All metrics of the project. A new one is one row in one of the tables; `docs/pages/reference/metrics.md`
is generated from them.
"""

from collections.abc import Mapping
from typing import Final

from pipelinerl_common.metrics.metric import (
    ACTOR,
    EVALUATOR,
    PREPROCESSOR,
    TRAINER,
    Kind,
    Metric,
    counter,
    gauge,
)
from pipelinerl_common.metrics.serving_catalog import (
    GENERATION,
    OPERATOR_METRICS,
    PROCESSES,
    WEIGHTS,
)

STAGES: Final = ("admitted", "running", "stream", "ready", "packed")
"""Of a group, in order: leased or to be leased again; decoded; on the stream or being checked and
scored; waiting for a batch; in the batch that is trained.
"""

LAYERS: Final = ("running", "assembly")
"""Of the staleness policy, beyond admission: it cancels a running group; it drops a finished one
when a batch is assembled.
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
    gauge(
        "queue_groups",
        "groups",
        (PREPROCESSOR,),
        "Groups in a stage between their prompt's grant and the optimizer step.",
        {"stage": STAGES},
    ),
    gauge(
        "queue_oldest_seconds",
        "seconds",
        (PREPROCESSOR,),
        "How long the oldest group of a stage has been in it; 0 when empty.",
        {"stage": STAGES},
    ),
    gauge(
        "outstanding_limit_groups",
        "groups",
        (PREPROCESSOR,),
        "Most groups that the staleness policy lets be admitted and not yet in a batch.",
    ),
    gauge(
        "stream_messages",
        "messages",
        (PREPROCESSOR,),
        "Messages on the sample stream that are not acknowledged: all that was published and not "
        "yet trained or dropped.",
    ),
    gauge("stream_bytes", "bytes", (PREPROCESSOR,), "Size of the sample stream."),
    gauge(
        "stream_limit_bytes",
        "bytes",
        (PREPROCESSOR,),
        "Size at which publishing to the sample stream waits.",
    ),
    counter(
        "leases_granted_total",
        "leases",
        (PREPROCESSOR,),
        "Leases of groups given to actors, repeated attempts included.",
    ),
    counter(
        "admission_closed_seconds_total",
        "seconds",
        (PREPROCESSOR,),
        "Time during which an actor asked for groups and the staleness policy let none start: its "
        "first layer, admission.",
    ),
    counter(
        "tokens_received_total",
        "tokens",
        (PREPROCESSOR,),
        "Sampled tokens that came from the stream.",
    ),
    counter(
        "groups_trained_total",
        "groups",
        (PREPROCESSOR,),
        "Groups whose optimizer step is committed.",
    ),
    counter(
        "groups_dropped_total",
        "groups",
        (PREPROCESSOR,),
        "Groups that ended untrained.",
        {"reason": DROP_REASONS},
    ),
    counter(
        "samples_dropped_total",
        "samples",
        (PREPROCESSOR,),
        "Finished trajectories of groups that ended untrained.",
        {"reason": DROP_REASONS},
    ),
    counter(
        "tokens_dropped_total",
        "tokens",
        (PREPROCESSOR,),
        "Sampled tokens that were thrown away, those of unfinished groups included.",
        {"reason": DROP_REASONS},
    ),
    counter(
        "stale_groups_total",
        "groups",
        (PREPROCESSOR,),
        "Groups that the staleness policy gave up, by its layer.",
        {"layer": LAYERS},
    ),
    counter(
        "stale_tokens_total",
        "tokens",
        (PREPROCESSOR,),
        "Sampled tokens of such groups.",
        {"layer": LAYERS},
    ),
    Metric(
        "staleness_steps",
        Kind.HISTOGRAM,
        "steps",
        (PREPROCESSOR,),
        "Trained groups by staleness: the step minus the version that sampled the oldest token.",
        buckets=(0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32),
    ),
    gauge(
        "staleness_bound_steps",
        "steps",
        (PREPROCESSOR,),
        "Largest staleness of a trained group that the staleness policy promises; missing without "
        "a promise.",
    ),
    counter(
        "sequences_masked_total",
        "samples",
        (PREPROCESSOR,),
        "Trajectories cut off at maxTokens and therefore not trained.",
    ),
    counter(
        "sequences_overlong_total",
        "samples",
        (PREPROCESSOR,),
        "Trajectories longer than the model or a micro-batch takes, and therefore not trained.",
    ),
    counter(
        "publishes_forced_total",
        "updates",
        (PREPROCESSOR,),
        "Weights that the staleness policy held back until the deadline and that went out all the "
        "same.",
    ),
    counter(
        "stream_events_total",
        "events",
        (ACTOR, PREPROCESSOR),
        "Faults on the way to and from the stream's server.",
        {"event": _STREAM_EVENTS},
    ),
    counter(
        "stream_set_aside_total",
        "messages",
        (PREPROCESSOR,),
        "Messages moved to the dead-letter subject, by what was wrong with them.",
        {"reason": ()},
    ),
)


MAX_LAG_BUCKET: Final = 15

PHASES: Final = ("wait", "train", "commit", "publish", "checkpoint")
"""Where the training thread's time goes: waiting for the batch; forward, backward and optimizer;
telling the preprocessor; handing the weights over; writing a checkpoint.
"""

_T: Final = (TRAINER,)

LEARNING: Final[tuple[Metric, ...]] = (
    gauge(
        "policy_version",
        "steps",
        _T,
        "Optimizer steps done, which is the version of the newest weights.",
    ),
    counter("optimizer_steps_total", "steps", _T, "Optimizer steps done by this process."),
    gauge(
        "last_step_timestamp_seconds",
        "seconds",
        _T,
        "When the newest step ended, in seconds since 1970.",
    ),
    counter(
        "skipped_steps_total",
        "steps",
        _T,
        "Steps that changed nothing because the gradient was not finite.",
    ),
    gauge(
        "non_finite_micro_batches", "micro-batches", _T, "Micro-batches whose loss was not finite."
    ),
    counter(
        "checkpoint_failures_total", "checkpoints", _T, "Checkpoints that could not be written."
    ),
    Metric(
        "lag_steps",
        Kind.HISTOGRAM,
        "steps",
        _T,
        "Trained tokens by lag: the version that trained them minus the version that sampled them.",
        buckets=tuple(float(lag) for lag in range(MAX_LAG_BUCKET + 1)),
        records_buckets=True,
    ),
    gauge("lag_mean", "steps", _T, "Mean lag of the batch's tokens."),
    gauge("lag_max", "steps", _T, "Largest lag of a token in the batch."),
    gauge(
        "ess",
        "ratio",
        _T,
        "Effective sample size of the batch's importance weights before truncation; 1 is on-policy.",
    ),
    gauge("ess_truncated", "ratio", _T, "The same after truncation or clipping."),
    gauge(
        "reward_mean", "reward", _T, "Mean reward of the batch's trajectories, as the task gave it."
    ),
    gauge(
        "success_mean",
        "ratio",
        _T,
        "Mean of the task's success metric; missing where the task has none.",
    ),
    gauge(
        "completion_length_mean",
        "tokens",
        _T,
        "Mean number of sampled tokens of the batch's trajectories.",
    ),
    gauge(
        "completion_overflow_ratio",
        "ratio",
        _T,
        "Share of the batch's trajectories that were cut off at maxTokens.",
    ),
    gauge("num_sequences", "samples", _T, "Trajectories in the batch."),
    gauge("num_trained_tokens", "tokens", _T, "Tokens with a loss in the batch."),
    counter("samples_trained_total", "samples", _T, "Trajectories trained by this process."),
    counter("tokens_trained_total", "tokens", _T, "Tokens trained by this process."),
    gauge("loss", "loss", _T, "The step's loss."),
    gauge(
        "grad_norm",
        "norm",
        _T,
        "Norm of the gradient before clipping; missing for a step that was skipped.",
    ),
    gauge("entropy", "nats", _T, "Mean entropy of the policy over the batch's tokens."),
    gauge("kl_ref", "nats", _T, "Mean KL estimate to the reference model; missing without one."),
    gauge(
        "kl_behavior",
        "nats",
        _T,
        "Mean KL estimate from the policies that sampled the tokens to the one that is trained.",
    ),
    gauge(
        "ratio_mean",
        "ratio",
        _T,
        "Mean importance weight of the batch's tokens before any bound; near 1 when all is well.",
    ),
    gauge("ratio_max", "ratio", _T, "Largest importance weight of a token before any bound."),
    gauge(
        "clip_fraction",
        "ratio",
        _T,
        "Share of the tokens whose weight was clipped, truncated or masked.",
    ),
    gauge(
        "value_error",
        "reward",
        _T,
        "Half the mean squared error of the value head; missing without one.",
    ),
    gauge("learning_rate", "rate", _T, "The step's learning rate."),
    gauge("packing_fill", "ratio", _T, "Share of the micro-batches' slots that hold a token."),
    gauge("packing_imbalance", "ratio", _T, "(most - fewest) / most tokens of a rank."),
    gauge("step_seconds", "seconds", _T, "Duration of the step, all phases."),
    gauge("wait_seconds", "seconds", _T, "Of it, waiting for the batch."),
    gauge("train_seconds", "seconds", _T, "Of it, forward, backward and optimizer."),
    counter(
        "trainer_phase_seconds_total",
        "seconds",
        _T,
        "Time of the training thread by what it did.",
        {"phase": PHASES},
    ),
)


_E: Final = (EVALUATOR,)
_SET: Final = {"set": ()}
_SET_K: Final = {"set": (), "k": ()}

OUTCOMES: Final = ("done", "failed")
SKIPS: Final = ("overtaken", "removed")
"""A newer step was due by the time that there was room; the checkpoint was removed before it could
be pinned.
"""

EVALUATION: Final[tuple[Metric, ...]] = (
    gauge(
        "evaluated_step",
        "steps",
        _E,
        "Optimizer steps behind the weights of the newest result; missing before the first.",
    ),
    gauge(
        "evaluation_pass_ratio",
        "ratio",
        _E,
        "pass@k: chance that one of k answers passes, mean over a set's prompts.",
        _SET_K,
    ),
    gauge("evaluation_pass_ratio_low", "ratio", _E, "Lower end of its 95 % interval.", _SET_K),
    gauge("evaluation_pass_ratio_high", "ratio", _E, "Upper end of its 95 % interval.", _SET_K),
    gauge("evaluation_reward_mean", "reward", _E, "Mean reward over a set's prompts.", _SET),
    gauge("evaluation_reward_low", "reward", _E, "Lower end of its 95 % interval.", _SET),
    gauge("evaluation_reward_high", "reward", _E, "Upper end of its 95 % interval.", _SET),
    gauge(
        "evaluation_tokens_mean",
        "tokens",
        _E,
        "Mean number of sampled tokens of a set's answers.",
        _SET,
    ),
    gauge(
        "evaluation_truncated_ratio",
        "ratio",
        _E,
        "Share of a set's answers that were cut off at maxTokens.",
        _SET,
    ),
    gauge(
        "evaluation_prompts",
        "prompts",
        _E,
        "Prompts of a set that the newest result rests on.",
        _SET,
    ),
    gauge(
        "evaluation_sets_failed", "sets", _E, "Sets of the newest evaluation that have no result."
    ),
    gauge(
        "evaluation_seconds",
        "seconds",
        _E,
        "Duration of the newest evaluation, its generator's start included.",
    ),
    gauge(
        "evaluation_running_step",
        "steps",
        _E,
        "Step whose weights are being evaluated; -1 while none are.",
    ),
    gauge(
        "evaluation_prompts_done",
        "prompts",
        _E,
        "Prompts of a set that the running evaluation is through with.",
        _SET,
    ),
    gauge("evaluation_prompts_planned", "prompts", _E, "Prompts of a set.", _SET),
    counter(
        "evaluations_total",
        "evaluations",
        _E,
        "Evaluations that ended; failed: a set has no result.",
        {"outcome": OUTCOMES},
    ),
    counter(
        "evaluations_skipped_total",
        "steps",
        _E,
        "Due steps that were not evaluated, by the reason.",
        {"reason": SKIPS},
    ),
    counter(
        "evaluation_prompts_failed_total",
        "prompts",
        _E,
        "Prompts that are in no estimate since they failed, by set and reason.",
        {"set": (), "reason": ()},
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
"""By the section of the documentation."""

CATALOG: Final[Mapping[str, Metric]] = {
    metric.name: metric for table in TABLES.values() for metric in table
}
"""By name, without `pipelinerl_`."""


def metrics_of(role: str) -> tuple[Metric, ...]:
    """What processes of `role` export."""
    return tuple(metric for metric in CATALOG.values() if role in metric.roles)
