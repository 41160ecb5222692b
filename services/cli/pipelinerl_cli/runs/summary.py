"""summary.json: what a run came to, in numbers.

What is printed when a run has ended.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelinerl_cli.runs.evaluations import Evaluated, Interval
from pipelinerl_cli.runs.history import RunHistory
from pipelinerl_cli.runs.records import SESSION_ROLE
from pipelinerl_common.metrics import EVALUATOR
from pipelinerl_common.text import counted


def summarize(history: RunHistory, *, status: str, job: str, seed: int) -> dict[str, Any]:
    """The summary's keys. A number that the run has no data for is None.

    status               "finished", "interrupted" or "failed"
    steps                optimizer steps done
    seconds              of the run, start-up included, time between sessions left out
    training_seconds     in which it generated or trained: of each session from its first token or step to its last
    reward_first, _last  means of the steps' mean rewards over the first and the last steps: at most
    5 of each, none in both
    lag_mean             per trained token, in steps; lag_max over the run
    ess_min, ess_mean    per step, 1 is on-policy
    weight_updates       versions that the generators took while running
    pause_seconds_mean   over the steps: decoding stood still for the update, on the slowest member
    transfer_seconds_mean likewise
    tokens_generated     by all actors; tokens_trained those that had a loss in the steps that counted
    waste                share of the generated tokens that were never trained
    tokens_per_second    generated, mean over training_seconds
    restarts             of processes, all sessions; by process in restarts_by_process
    dropped_groups       by reason
    evaluation           by set: step, pass_at and reward as {mean, low, high} of the newest evaluation, first of the oldest;
                         evaluations_skipped by reason
    """
    steps = history.steps
    generated = history.generation.tokens
    trained = sum(step.values.get("num_trained_tokens", 0.0) for step in steps)
    return {
        "job": job,
        "status": status,
        "seed": seed,
        "steps": steps[-1].step if steps else 0,
        "seconds": _rounded(history.seconds),
        "training_seconds": _rounded(history.training_seconds),
        "reward_first": _mean(step.get("reward_mean") for step in history.first_steps),
        "reward_last": _mean(step.get("reward_mean") for step in history.last_steps),
        "reward_max": _max(step.get("reward_mean") for step in steps),
        "success_last": _mean(step.get("success_mean") for step in history.last_steps),
        "lag_max": _max(step.get("lag_max") for step in steps),
        "lag_mean": _weighted_mean(
            (step.get("lag_mean"), step.get("num_trained_tokens")) for step in steps
        ),
        "ess_min": _min(step.get("ess") for step in steps),
        "ess_mean": _mean(step.get("ess") for step in steps),
        "weight_updates": int(history.total("trainer", "weight_updates_total")),
        "weight_update_failures": int(history.total("trainer", "weight_update_failures_total")),
        "pause_seconds_mean": _mean(point.value for point in history.of_steps("pause_seconds")),
        "transfer_seconds_mean": _mean(
            point.value for point in history.of_steps("transfer_seconds")
        ),
        "samples_trained": int(steps[-1].samples) if steps else 0,
        "tokens_generated": int(generated),
        "tokens_trained": int(trained),
        "waste": _rounded(max(0.0, 1 - trained / generated)) if generated else None,
        "tokens_per_second": _rounded(history.generation.tokens_per_second),
        "dropped_groups": _by_middle(history, "preprocessor", "groups_dropped_total{reason=", "}"),
        "rollout_errors": _by_middle(history, "actor", "rollout_errors_total{reason=", "}"),
        "restarts": int(history.total(SESSION_ROLE, "restarts_total")),
        "restarts_by_process": _by_middle(history, SESSION_ROLE, "restarts_", "_process_total"),
        "evaluation": {name: _evaluation(each) for name, each in history.evaluations.items()},
        "evaluations_failed": int(history.total(EVALUATOR, "evaluations_total{outcome=failed}")),
        "evaluations_skipped": _by_middle(
            history, EVALUATOR, "evaluations_skipped_total{reason=", "}"
        ),
    }


def _evaluation(of_set: Sequence[Evaluated]) -> dict[str, Any]:
    """`of_set` in order of steps, with at least one."""
    first, last = of_set[0], of_set[-1]
    return {
        "step": last.step,
        "pass_at": {str(k): _edges(interval) for k, interval in last.pass_at.items()},
        "reward": _edges(last.reward),
        "tokens_mean": _rounded(last.tokens_mean),
        "truncated_ratio": _rounded(last.truncated_ratio),
        "prompts": last.num_prompts,
        "first": {
            "step": first.step,
            "pass_at": {str(k): _edges(interval) for k, interval in first.pass_at.items()},
            "reward": _edges(first.reward),
        },
    }


def _edges(interval: Interval) -> dict[str, float | None]:
    return {
        "mean": _rounded(interval.mean),
        "low": _rounded(interval.low),
        "high": _rounded(interval.high),
    }


def _by_middle(history: RunHistory, role: str, prefix: str, suffix: str) -> dict[str, int]:
    """Counters named prefix + reason + suffix, by reason, those that counted anything."""
    counts: dict[str, int] = {}
    for name in sorted(history.names(role)):
        if (
            name.startswith(prefix)
            and name.endswith(suffix)
            and len(name) > len(prefix) + len(suffix)
        ):
            count = int(history.total(role, name))
            if count:
                counts[name[len(prefix) : -len(suffix)]] = count
    return counts


def _finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _mean(values: Iterable[float]) -> float | None:
    finite = _finite(values)
    return _rounded(sum(finite) / len(finite)) if finite else None


def _max(values: Iterable[float]) -> float | None:
    return _rounded(max(_finite(values), default=math.nan))


def _min(values: Iterable[float]) -> float | None:
    return _rounded(min(_finite(values), default=math.nan))


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


def print_outcome(summary: Mapping[str, Any], root: Path, failure: str | None) -> None:
    if failure is not None:
        print(f"the run failed: {failure}")
        print(f"logs: {root / 'logs'}")
    if summary["steps"]:
        print(_line(summary))
        for line in evaluation_lines(summary):
            print(line)
    if summary["status"] == "interrupted":
        print("stopped; the same command goes on with the run")
    print(f"report: {root / 'report.html'}")


def _line(summary: Mapping[str, Any]) -> str:
    restarts = f", {counted(summary['restarts'], 'restart')}" if summary["restarts"] else ""
    updates = counted(summary["weight_updates"], "in-flight update")
    return (
        f"{counted(summary['steps'], 'step')} in {shown(summary['training_seconds'], '.0f')} s of "
        "training, "
        f"{shown(summary['seconds'], '.0f')} s in all: "
        f"reward {shown(summary['reward_first'], '.3f')} -> "
        f"{shown(summary['reward_last'], '.3f')}, "
        f"{updates} (pause {shown(summary['pause_seconds_mean'], '.3f')} s mean), "
        f"lag {shown(summary['lag_mean'], '.2f')} mean {shown(summary['lag_max'], '.0f')} max, "
        f"ESS {shown(summary['ess_mean'], '.3f')}, {shown(summary['tokens_per_second'], ',.0f')} "
        f"tokens/s mean{restarts}"
    )


def evaluation_lines(summary: Mapping[str, Any]) -> list[str]:
    """Example: "held-out: pass@1 0.210 -> 0.812 (0.766 to 0.853) at step 60"."""
    lines = []
    for name, each in summary.get("evaluation", {}).items():
        parts = []
        for k, now in each["pass_at"].items():
            before = each["first"]["pass_at"].get(k, {}).get("mean")
            began = f"{shown(before, '.3f')} -> " if each["first"]["step"] != each["step"] else ""
            parts.append(
                f"pass@{k} {began}{shown(now['mean'], '.3f')} ({shown(now['low'], '.3f')} to "
                f"{shown(now['high'], '.3f')})"
            )
        lines.append(f"{name}: {', '.join(parts)} at step {each['step']}")
    return lines


def shown(value: float | None, form: str) -> str:
    """Example: shown(0.1234, ".2f") is "0.12"; shown(None, ".2f") is "-"."""
    return "-" if value is None else format(value, form)
