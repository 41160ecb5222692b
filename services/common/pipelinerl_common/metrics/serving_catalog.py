"""The actors' and the generators': what is sampled, how fast, and how full the generators are.

In-flight weight updates: the trainer's, the coordinator's and the generators' side.

The processes themselves.

The operator's own, over all jobs. What only the leader knows is missing on the other replicas.
"""

from typing import Final

from pipelinerl_common.metrics.metric import (
    ACTOR,
    COORDINATOR,
    GENERATOR,
    JOB_ROLES,
    OPERATOR,
    PREPROCESSOR,
    REFERENCE,
    SECONDS,
    TRAINER,
    Kind,
    Metric,
    counter,
    gauge,
)

_ENGINES: Final = (GENERATOR, REFERENCE)
_FINISH_REASONS: Final = ("stop", "length", "abort")
_REFUSALS: Final = ("draining", "no_weights", "overloaded")

GENERATION: Final[tuple[Metric, ...]] = (
    counter(
        "tokens_generated_total",
        "tokens",
        (ACTOR,),
        "Sampled tokens that came back from generators.",
    ),
    counter("samples_generated_total", "samples", (ACTOR,), "Trajectories published."),
    counter("groups_published_total", "groups", (ACTOR,), "Groups put on the stream."),
    counter(
        "groups_failed_total",
        "groups",
        (ACTOR,),
        "Groups given up because too few of their trajectories succeeded.",
    ),
    counter(
        "rollout_errors_total",
        "errors",
        (ACTOR,),
        "Requests tried again and trajectories given up, by what went wrong.",
        {
            "reason": (
                "generator_away",
                "generator_error",
                "task_error",
                "task_retry",
                "timeout",
                "verifier_timeout",
            )
        },
    ),
    gauge(
        "requests_running",
        "sequences",
        (ACTOR,),
        "Sequences that the actor's generators decode for it.",
    ),
    gauge(
        "requests_limit",
        "sequences",
        (ACTOR,),
        "Sequences that they may decode at once: H of each generator, together.",
    ),
    gauge(
        "generation_tokens_per_second",
        "tokens per second",
        (ACTOR,),
        "Sampled tokens per second since the last record.",
    ),
    Metric(
        "completion_tokens",
        Kind.HISTOGRAM,
        "tokens",
        (ACTOR,),
        "Sampled turns by their length.",
        buckets=tuple(float(2**power) for power in range(0, 18)),
    ),
    Metric(
        "group_seconds",
        Kind.HISTOGRAM,
        "seconds",
        (ACTOR,),
        "Groups by the time from their lease to their publication.",
        buckets=(*SECONDS, 1000.0, 3000.0),
    ),
    Metric(
        "verification_seconds",
        Kind.HISTOGRAM,
        "seconds",
        (ACTOR,),
        "Verifications of an answer by their time.",
        buckets=SECONDS,
    ),
    counter("sampled_tokens_total", "tokens", _ENGINES, "Tokens that this generator sampled."),
    counter("prompt_tokens_total", "tokens", _ENGINES, "Tokens of the prompts that it was given."),
    counter(
        "scored_tokens_total", "tokens", _ENGINES, "Tokens whose log-probability was asked for."
    ),
    counter(
        "sequences_finished_total",
        "sequences",
        _ENGINES,
        "Sequences that were sampled to their end.",
        {"finish_reason": _FINISH_REASONS},
    ),
    counter(
        "sequences_cancelled_total", "sequences", _ENGINES, "Sequences whose client went away."
    ),
    counter(
        "requests_refused_total",
        "requests",
        _ENGINES,
        "Requests that were turned away.",
        {"reason": _REFUSALS},
    ),
    gauge(
        "sequences_running",
        "sequences",
        _ENGINES,
        "Sequences that the generator has, those that wait in its engine included.",
    ),
    gauge(
        "sequences_waiting",
        "sequences",
        _ENGINES,
        "Sequences that wait in the engine for a place or for KV blocks.",
    ),
    gauge(
        "sequences_limit",
        "sequences",
        _ENGINES,
        "Sequences that the engine decodes at once, at most (H).",
    ),
    gauge(
        "kv_cache_usage_ratio",
        "ratio",
        _ENGINES,
        "Share of the KV cache's blocks in use; missing where the engine has none.",
    ),
    counter(
        "preemptions_total",
        "sequences",
        _ENGINES,
        "Sequences that lost their KV blocks to others and were computed again.",
    ),
    counter(
        "decode_steps_total",
        "steps",
        _ENGINES,
        "Decode steps that were timed: those that followed another one at once.",
    ),
    counter("decode_step_seconds_total", "seconds", _ENGINES, "What these decode steps took."),
    gauge(
        "engine_kv_usage_ratio",
        "ratio",
        (PREPROCESSOR,),
        "Share of the KV blocks in use on the fullest generator, as the actors tell; what adaptive "
        "policies go by.",
    ),
    gauge(
        "engine_sequences_waiting",
        "sequences",
        (PREPROCESSOR,),
        "Sequences that wait in all engines, as the actors tell.",
    ),
    counter(
        "engine_preemptions_total",
        "sequences",
        (PREPROCESSOR,),
        "Preemptions of all engines, as the actors tell.",
    ),
)


_MODES: Final = {"mode": ("staged", "inplace")}

WEIGHTS: Final[tuple[Metric, ...]] = (
    gauge(
        "served_version",
        "steps",
        (TRAINER, PREPROCESSOR, COORDINATOR),
        "Policy version that the generators serve, as far as this process knows; -1 before the "
        "first.",
    ),
    counter("weight_updates_total", "updates", (TRAINER,), "Versions that were published."),
    counter(
        "weight_update_failures_total",
        "updates",
        (TRAINER,),
        "Attempts to publish a version that failed.",
    ),
    gauge(
        "publish_seconds",
        "seconds",
        (TRAINER,),
        "Newest update, from the request to the last generator's answer.",
    ),
    gauge(
        "pause_seconds",
        "seconds",
        (TRAINER,),
        "Newest update: time without decoding, of the slowest generator.",
    ),
    gauge(
        "transfer_seconds",
        "seconds",
        (TRAINER,),
        "Newest update: time of the broadcast, of the slowest generator.",
    ),
    gauge(
        "apply_seconds",
        "seconds",
        (TRAINER,),
        "Newest update: time to load and put in place, of the slowest generator.",
    ),
    gauge(
        "update_bytes",
        "bytes",
        (TRAINER,),
        "Newest update: bytes that each generator was sent; with an adapter, its alone.",
    ),
    gauge(
        "weight_version",
        "steps",
        _ENGINES,
        "Policy version of this generator's weights; -1 before the first update.",
    ),
    gauge(
        "weight_epoch",
        "epochs",
        _ENGINES,
        "Epoch of the weight-transfer group that this generator is in; 0 for none.",
    ),
    counter(
        "weight_updates_applied_total",
        "updates",
        _ENGINES,
        "Updates that this generator took.",
        _MODES,
    ),
    counter(
        "weight_update_errors_total",
        "updates",
        _ENGINES,
        "Updates that this generator did not take, by the error.",
        {"reason": ()},
    ),
    Metric(
        "weight_pause_seconds",
        Kind.HISTOGRAM,
        "seconds",
        _ENGINES,
        "Updates by the time without decoding.",
        _MODES,
        SECONDS,
    ),
    Metric(
        "weight_transfer_seconds",
        Kind.HISTOGRAM,
        "seconds",
        _ENGINES,
        "Updates by the time from being ready for the first bytes to having the last.",
        _MODES,
        SECONDS,
    ),
    gauge(
        "transfer_group_epoch",
        "epochs",
        (COORDINATOR,),
        "Epoch of the weight-transfer group; 0 while there is none.",
    ),
    gauge(
        "transfer_group_members",
        "generators",
        (COORDINATOR,),
        "Generators in the weight-transfer group.",
    ),
    gauge(
        "generators_expected", "generators", (COORDINATOR,), "Generators that the job should have."
    ),
    gauge("generators_absent", "generators", (COORDINATOR,), "Generators that do not answer."),
    counter(
        "transfer_groups_formed_total",
        "groups",
        (COORDINATOR,),
        "Weight-transfer groups that were formed.",
    ),
    counter(
        "transfer_group_failures_total",
        "groups",
        (COORDINATOR,),
        "Weight-transfer groups that did not form.",
    ),
    counter(
        "updates_coordinated_total",
        "updates",
        (COORDINATOR,),
        "Updates that were fanned out to the members.",
        {"outcome": ("published", "failed")},
    ),
    counter(
        "member_expulsions_total",
        "generators",
        (COORDINATOR,),
        "Generators that were left out of the group after a fault.",
    ),
)


PROCESSES: Final[tuple[Metric, ...]] = (
    gauge("memory_bytes", "bytes", JOB_ROLES, "Resident memory of the process."),
    counter(
        "restarts_total",
        "processes",
        (COORDINATOR,),
        "Processes of the job that were started again, by their role.",
        {
            "restarted": (
                "preprocessor",
                "actor",
                "generator",
                "reference",
                "trainer",
                "evaluator",
                "nats-server",
            )
        },
    ),
    gauge(
        "actors_desired",
        "actors",
        (COORDINATOR,),
        "Actors that there should be: those of the spec, or what autoscale chose.",
    ),
    gauge(
        "actors_ready",
        "actors",
        (COORDINATOR,),
        "Actors that run, in `pipelinerl up` with every generator in the weight-transfer group.",
    ),
    gauge(
        "autoscale_ratio",
        "ratio",
        (COORDINATOR,),
        "The system's throughput over what generation alone would reach, when autoscale last "
        "looked.",
    ),
    counter(
        "sink_rows_total",
        "rows",
        (TRAINER,),
        "Rows, one per step, by what a sink did with them: written; full when it was too slow; "
        "failed when it raised an error.",
        {"sink": ("wandb", "tensorboard"), "outcome": ("written", "full", "failed")},
    ),
)


_O: Final = (OPERATOR,)

OPERATOR_METRICS: Final[tuple[Metric, ...]] = (
    gauge("operator_leader", "replicas", _O, "1 on the replica that leads, 0 on the others."),
    Metric(
        "operator_reconcile_seconds",
        Kind.HISTOGRAM,
        "seconds",
        _O,
        "Looks at a job by their duration.",
        buckets=SECONDS,
    ),
    counter(
        "operator_reconciles_total",
        "jobs",
        _O,
        "Looks at a job by outcome: done, retried after an error of the API server, failed by a "
        "fault of the operator.",
        {"outcome": ("done", "retried", "failed")},
    ),
    gauge("operator_queue_depth", "jobs", _O, "Jobs that wait to be looked at."),
    gauge("operator_queue_oldest_seconds", "seconds", _O, "How long the first of them has waited."),
    gauge(
        "operator_watch_silence_seconds",
        "seconds",
        _O,
        "Longest time since something was heard on a watch.",
    ),
    gauge("operator_watches", "watches", _O, "Watches that are kept."),
    counter(
        "operator_watch_restarts_total",
        "watches",
        _O,
        "Lists and watches that were begun again after a failure.",
    ),
    counter(
        "operator_api_requests_total",
        "requests",
        _O,
        "Requests to the API server by verb and HTTP status; `none` for no answer.",
        {"verb": (), "code": ()},
    ),
    gauge("operator_jobs", "jobs", _O, "Jobs by phase.", {"phase": ()}),
    gauge("operator_memory_bytes", "bytes", _O, "Resident memory of the operator."),
)
