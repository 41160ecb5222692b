"""The actors' and the generators': what is sampled, how fast, and how full the generators are."""

from typing import Final

from pipelinerl_common.metrics.metric import (
    ACTOR,
    GENERATOR,
    PREPROCESSOR,
    REFERENCE,
    SECONDS,
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
