"""The evaluator's: how good checkpoints are on the job's evaluation sets. Gauges of results are of
the newest evaluation.
"""

from typing import Final

from pipelinerl_common.metrics.metric import EVALUATOR, Metric, counter, gauge

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
