"""The preprocessor's: where groups are, how old they get, and what becomes of them."""

from typing import Final

from pipelinerl_common.metrics.metric import ACTOR, PREPROCESSOR, Kind, Metric, counter, gauge

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
