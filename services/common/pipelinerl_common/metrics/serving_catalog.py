"""Metrics of the processes that serve training: generation, weight updates, processes, operator."""

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
    Metric,
    counter,
    exported_by,
    gauge,
    histogram,
)

_ENGINES: Final = (GENERATOR, REFERENCE)
_FINISH_REASONS: Final = ("stop", "length", "abort")
_REFUSALS: Final = ("draining", "no_weights", "overloaded")

GENERATION: Final[tuple[Metric, ...]] = (
    *exported_by(
        (ACTOR,),
        counter(
            "tokens_generated_total", "tokens", "Sampled tokens that came back from generators."
        ),
        counter("samples_generated_total", "samples", "Trajectories published."),
        counter("groups_published_total", "groups", "Groups put on the stream."),
        counter(
            "groups_failed_total",
            "groups",
            "Groups given up because too few of their trajectories succeeded.",
        ),
        counter(
            "rollout_errors_total",
            "errors",
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
            "requests_running", "sequences", "Sequences that the actor's generators decode for it."
        ),
        gauge(
            "requests_limit",
            "sequences",
            "Sequences that they may decode at once: H of each generator, together.",
        ),
        gauge(
            "generation_tokens_per_second",
            "tokens per second",
            "Sampled tokens per second since the last record.",
        ),
        histogram(
            "completion_tokens",
            "tokens",
            "Sampled turns by their length.",
            tuple(float(2**power) for power in range(0, 18)),
        ),
        histogram(
            "group_seconds",
            "seconds",
            "Groups by the time from their lease to their publication.",
            (*SECONDS, 1000.0, 3000.0),
        ),
        histogram(
            "verification_seconds", "seconds", "Verifications of an answer by their time.", SECONDS
        ),
    ),
    *exported_by(
        _ENGINES,
        counter("sampled_tokens_total", "tokens", "Tokens that this generator sampled."),
        counter("prompt_tokens_total", "tokens", "Tokens of the prompts that it was given."),
        counter("scored_tokens_total", "tokens", "Tokens whose log-probability was asked for."),
        counter(
            "sequences_finished_total",
            "sequences",
            "Sequences that were sampled to their end.",
            {"finish_reason": _FINISH_REASONS},
        ),
        counter("sequences_cancelled_total", "sequences", "Sequences whose client went away."),
        counter(
            "requests_refused_total",
            "requests",
            "Requests that were turned away.",
            {"reason": _REFUSALS},
        ),
        gauge(
            "sequences_running",
            "sequences",
            "Sequences that the generator has, those that wait in its engine included.",
        ),
        gauge(
            "sequences_waiting",
            "sequences",
            "Sequences that wait in the engine for a place or for KV blocks.",
        ),
        gauge(
            "sequences_limit",
            "sequences",
            "Sequences that the engine decodes at once, at most (H).",
        ),
        gauge(
            "kv_cache_usage_ratio",
            "ratio",
            "Share of the KV cache's blocks in use; missing where the engine has none.",
        ),
        counter(
            "preemptions_total",
            "sequences",
            "Sequences that lost their KV blocks to others and were computed again.",
        ),
        counter(
            "decode_steps_total",
            "steps",
            "Decode steps that were timed: those that followed another one at once.",
        ),
        counter("decode_step_seconds_total", "seconds", "What these decode steps took."),
    ),
    *exported_by(
        (PREPROCESSOR,),
        gauge(
            "engine_kv_usage_ratio",
            "ratio",
            "Share of the KV blocks in use on the fullest generator, as reported by the actors; "
            "the input of adaptive policies.",
        ),
        gauge(
            "engine_sequences_waiting",
            "sequences",
            "Sequences that wait in all engines, as reported by the actors.",
        ),
        counter(
            "engine_preemptions_total",
            "sequences",
            "Preemptions of all engines, as reported by the actors.",
        ),
    ),
)


_MODES: Final = {"mode": ("staged", "inplace")}

WEIGHTS: Final[tuple[Metric, ...]] = (
    *exported_by(
        (TRAINER, PREPROCESSOR, COORDINATOR),
        gauge(
            "served_version",
            "steps",
            "Policy version that the generators serve, as far as this process knows; -1 before the "
            "first.",
        ),
    ),
    *exported_by(
        (TRAINER,),
        counter("weight_updates_total", "updates", "Versions that were published."),
        counter(
            "weight_update_failures_total", "updates", "Attempts to publish a version that failed."
        ),
        gauge(
            "publish_seconds",
            "seconds",
            "Newest update, from the request to the last generator's answer.",
        ),
        gauge(
            "pause_seconds",
            "seconds",
            "Newest update: time without decoding, of the slowest generator.",
        ),
        gauge(
            "transfer_seconds",
            "seconds",
            "Newest update: time of the transfer, of the slowest generator.",
        ),
        gauge(
            "apply_seconds",
            "seconds",
            "Newest update: time to load and put in place, of the slowest generator.",
        ),
        gauge(
            "update_bytes",
            "bytes",
            "Newest update: bytes that each generator was sent; with an adapter, its alone.",
        ),
    ),
    *exported_by(
        _ENGINES,
        gauge(
            "weight_version",
            "steps",
            "Policy version of this generator's weights; -1 before the first update.",
        ),
        gauge(
            "weight_epoch",
            "epochs",
            "Epoch of the weight-transfer group that this generator is in; 0 for none.",
        ),
        counter(
            "weight_updates_applied_total", "updates", "Updates that this generator took.", _MODES
        ),
        counter(
            "weight_update_errors_total",
            "updates",
            "Updates that this generator did not take, by the error.",
            {"reason": ()},
        ),
        histogram(
            "weight_pause_seconds",
            "seconds",
            "Updates by the time without decoding.",
            SECONDS,
            labels=_MODES,
        ),
        histogram(
            "weight_transfer_seconds",
            "seconds",
            "Updates by the time from being ready for the first bytes to having the last.",
            SECONDS,
            labels=_MODES,
        ),
    ),
    *exported_by(
        (COORDINATOR,),
        gauge(
            "transfer_group_epoch",
            "epochs",
            "Epoch of the weight-transfer group; 0 while there is none.",
        ),
        gauge("transfer_group_members", "generators", "Generators in the weight-transfer group."),
        gauge("generators_expected", "generators", "Generators that the job should have."),
        gauge("generators_absent", "generators", "Generators that do not answer."),
        counter(
            "transfer_groups_formed_total", "groups", "Weight-transfer groups that were formed."
        ),
        counter(
            "transfer_group_failures_total", "groups", "Weight-transfer groups that did not form."
        ),
        counter(
            "updates_coordinated_total",
            "updates",
            "Updates that were fanned out to the members.",
            {"outcome": ("published", "failed")},
        ),
        counter(
            "member_expulsions_total",
            "generators",
            "Generators that were left out of the group after a fault.",
        ),
    ),
)


PROCESSES: Final[tuple[Metric, ...]] = (
    *exported_by(
        JOB_ROLES,
        gauge("memory_bytes", "bytes", "Resident memory of the process."),
    ),
    *exported_by(
        (COORDINATOR,),
        counter(
            "restarts_total",
            "processes",
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
            "Actors that there should be: those of the spec, or what autoscale chose.",
        ),
        gauge(
            "actors_ready",
            "actors",
            "Running actors, in `pipelinerl up` with every generator in the weight-transfer group.",
        ),
        gauge(
            "autoscale_ratio",
            "ratio",
            "The system's throughput over what generation alone would reach, when autoscale last "
            "looked.",
        ),
    ),
    *exported_by(
        (TRAINER,),
        counter(
            "sink_rows_total",
            "rows",
            "Rows, one per step, by what a sink did with them: written; full when it was too slow; "
            "failed when it raised an error.",
            {"sink": ("wandb", "tensorboard"), "outcome": ("written", "full", "failed")},
        ),
    ),
)


OPERATOR_METRICS: Final[tuple[Metric, ...]] = (
    *exported_by(
        (OPERATOR,),
        gauge("operator_leader", "replicas", "1 on the replica that leads, 0 on the others."),
        histogram(
            "operator_reconcile_seconds", "seconds", "Looks at a job by their duration.", SECONDS
        ),
        counter(
            "operator_reconciles_total",
            "jobs",
            "Looks at a job by outcome: done, retried after an error of the API server, failed by "
            "a fault of the operator.",
            {"outcome": ("done", "retried", "failed")},
        ),
        gauge("operator_queue_depth", "jobs", "Jobs that wait to be looked at."),
        gauge("operator_queue_oldest_seconds", "seconds", "How long the first of them has waited."),
        gauge(
            "operator_watch_silence_seconds",
            "seconds",
            "Longest time since an event arrived on a watch.",
        ),
        gauge("operator_watches", "watches", "Watches that are kept."),
        counter(
            "operator_watch_restarts_total",
            "watches",
            "Lists and watches that were restarted after a failure.",
        ),
        counter(
            "operator_api_requests_total",
            "requests",
            "Requests to the API server by verb and HTTP status; `none` for no answer.",
            {"verb": (), "code": ()},
        ),
        gauge("operator_jobs", "jobs", "Jobs by phase.", {"phase": ()}),
        gauge("operator_memory_bytes", "bytes", "Resident memory of the operator."),
    ),
)
