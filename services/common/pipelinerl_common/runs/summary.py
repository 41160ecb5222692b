"""summary.json: what a run achieved, in numbers; and the lines that are printed at its end.

```
status                 "finished", "interrupted" or "failed"
steps                  optimizer steps done
seconds                of the run, start-up included, time between sessions left out
training_seconds       in which it generated or trained: each session from its first token or step
reward_first, _last    means over the first and the last steps: at most 5 of each, none in both
lag_mean, lag_max      in steps; the mean is over trained tokens
ess_min, ess_mean      of the steps, 1 is on-policy
weight_updates         versions that the generators took while running
pause_seconds_mean     of the steps: decoding paused for the update, on the slowest member
transfer_seconds_mean  likewise
tokens_generated       by all actors
tokens_trained         that had a loss in the steps that count
waste                  share of the generated tokens that were never trained
tokens_per_second      generated, mean over training_seconds
restarts               of processes, all sessions; restarts_by_process likewise
dropped_groups         by reason; so are rollout_errors and evaluations_skipped
evaluation             by set: step, pass_at and reward as {mean, low, high} of the newest
                       evaluation, `first` of the oldest
```
A number that the run has no data for is None.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from pipelinerl_common.metrics import EVALUATOR
from pipelinerl_common.runs.evaluations import Evaluated, Interval
from pipelinerl_common.runs.history import RunHistory
from pipelinerl_common.runs.records import SESSION_ROLE


def summarize(history: RunHistory, *, status: str, job: str, seed: int) -> dict[str, Any]:
    """The document of summary.json; the keys are explained at the top of this module."""
    last = history.steps[-1] if history.steps else None
    return {
        "job": job,
        "status": status,
        "seed": seed,
        "steps": last.step if last else 0,
        "seconds": _rounded(history.seconds),
        "training_seconds": _rounded(history.training_seconds),
        **_learning(history),
        **_updates(history),
        "samples_trained": int(last.samples) if last else 0,
        **_tokens(history),
        "dropped_groups": _counts(history, "preprocessor", "groups_dropped_total{reason=", "}"),
        "rollout_errors": _counts(history, "actor", "rollout_errors_total{reason=", "}"),
        "restarts": int(history.total(SESSION_ROLE, "restarts_total")),
        "restarts_by_process": _counts(history, SESSION_ROLE, "restarts_", "_process_total"),
        "evaluation": {name: _evaluation(each) for name, each in history.evaluations.items()},
        "evaluations_failed": int(history.total(EVALUATOR, "evaluations_total{outcome=failed}")),
        "evaluations_skipped": _counts(
            history, EVALUATOR, "evaluations_skipped_total{reason=", "}"
        ),
    }


def _learning(history: RunHistory) -> dict[str, float | None]:
    steps = history.steps
    rewards, lags, ess = (
        [step.get(name) for step in steps] for name in ("reward_mean", "lag_max", "ess")
    )
    token_lags = ((step.get("lag_mean"), step.get("num_trained_tokens")) for step in steps)
    return {
        "reward_first": _mean(step.get("reward_mean") for step in history.first_steps),
        "reward_last": _mean(step.get("reward_mean") for step in history.last_steps),
        "reward_max": _rounded(max(_finite(rewards), default=math.nan)),
        "success_last": _mean(step.get("success_mean") for step in history.last_steps),
        "lag_max": _rounded(max(_finite(lags), default=math.nan)),
        "lag_mean": _weighted_mean(token_lags),
        "ess_min": _rounded(min(_finite(ess), default=math.nan)),
        "ess_mean": _mean(ess),
    }


def _updates(history: RunHistory) -> dict[str, float | None]:
    return {
        "weight_updates": int(history.total("trainer", "weight_updates_total")),
        "weight_update_failures": int(history.total("trainer", "weight_update_failures_total")),
        "pause_seconds_mean": _mean(point.value for point in history.of_steps("pause_seconds")),
        "transfer_seconds_mean": _mean(
            point.value for point in history.of_steps("transfer_seconds")
        ),
    }


def _tokens(history: RunHistory) -> dict[str, float | None]:
    generated = history.generation.tokens
    trained = sum(step.values.get("num_trained_tokens", 0.0) for step in history.steps)
    return {
        "tokens_generated": int(generated),
        "tokens_trained": int(trained),
        "waste": _rounded(max(0.0, 1 - trained / generated)) if generated else None,
        "tokens_per_second": _rounded(history.generation.tokens_per_second),
    }


def _evaluation(of_set: Sequence[Evaluated]) -> dict[str, Any]:
    """`of_set` in order of steps, with at least one."""
    first, last = of_set[0], of_set[-1]
    return {
        **_scores(last),
        "tokens_mean": _rounded(last.tokens_mean),
        "truncated_ratio": _rounded(last.truncated_ratio),
        "prompts": last.num_prompts,
        "first": _scores(first),
    }


def _scores(each: Evaluated) -> dict[str, Any]:
    return {
        "step": each.step,
        "pass_at": {str(k): _edges(interval) for k, interval in each.pass_at.items()},
        "reward": _edges(each.reward),
    }


def _edges(interval: Interval) -> dict[str, float | None]:
    return {edge: _rounded(getattr(interval, edge)) for edge in ("mean", "low", "high")}


def _counts(history: RunHistory, role: str, prefix: str, suffix: str) -> dict[str, int]:
    totals = history.totals_between(role, prefix, suffix)
    return {reason: int(count) for reason, count in totals.items() if count >= 1}


def _finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _mean(values: Iterable[float]) -> float | None:
    finite = _finite(values)
    return _rounded(sum(finite) / len(finite)) if finite else None


def _weighted_mean(pairs: Iterable[tuple[float, float]]) -> float | None:
    """Mean of values by their weights; a missing weight counts as 1."""
    finite = [
        (value, weight if math.isfinite(weight) else 1.0)
        for value, weight in pairs
        if math.isfinite(value)
    ]
    total = sum(weight for _, weight in finite)
    return _rounded(sum(value * weight for value, weight in finite) / total) if total else None


def _rounded(value: float) -> float | None:
    """Six significant digits; None for what is not a number."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
