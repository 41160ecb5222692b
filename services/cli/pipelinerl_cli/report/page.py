"""report.html and summary.json of one run."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipelinerl_cli.doctor.finding import Named
from pipelinerl_cli.doctor.rules import diagnose_run
from pipelinerl_cli.pages import render
from pipelinerl_cli.report.figures import (
    SMOOTHING,
    evaluation,
    learning,
    reward_over_time,
    staleness,
    throughput,
)
from pipelinerl_cli.report.svg import FRAME, clock, compact, duration
from pipelinerl_common.files import write_whole
from pipelinerl_common.runs.facts import RunFacts
from pipelinerl_common.runs.history import RunHistory
from pipelinerl_common.settings import Job, JobSpec
from pipelinerl_common.text import counted

MAX_ROWS = 100
"""The table of steps has no more."""
COLUMNS = {
    "reward": "reward_mean",
    "loss": "loss",
    "gradient norm": "grad_norm",
    "entropy": "entropy",
    "ESS": "ess",
    "lag mean": "lag_mean",
    "lag max": "lag_max",
    "tokens": "num_trained_tokens",
    "waiting s": "wait_seconds",
    "step s": "step_seconds",
}
"""The trainer's value by its heading in the table of steps."""
INCIDENTS = ("dropped_groups", "rollout_errors", "evaluations_skipped")
"""Counts by reason in the summary."""

Form = Callable[[Any], str]


def write_results(root: Path, job: Job, status: str, failure: str = "") -> dict[str, Any]:
    """Writes summary.json and report.html of the run in `root`; returns the summary.

    `failure` says in one line why the run failed, and is added to the file. Raises SettingsError
    when metrics.jsonl cannot be read, OSError when something cannot be written.
    """
    facts = RunFacts.of(root, job, status, failure=failure)
    document = {**facts.summary, **({"failure": failure} if failure else {})}
    write_whole(root / "summary.json", json.dumps(document, indent=2, allow_nan=False) + "\n")
    page = report_page(facts.history, facts.summary, job, diagnose_run(facts))
    write_whole(root / "report.html", page)
    return facts.summary


def report_page(
    history: RunHistory, summary: Mapping[str, Any], job: Job, findings: Sequence[Named]
) -> str:
    """The whole page. Figures without data say so; `findings` are the doctor's."""
    trained = history.in_training_time()
    settings = job.model_dump(mode="json", by_alias=True)
    return render(
        "report.html.j2",
        frame=FRAME,
        job=job.name,
        status=summary["status"],
        facts=_facts(job.spec),
        smoothing=SMOOTHING,
        void=_void(history.num_void_steps),
        hero=reward_over_time(trained),
        numbers=_tiles(summary),
        small_numbers=_small_tiles(summary),
        learning=learning(trained),
        evaluation=evaluation(history),
        staleness=staleness(trained),
        throughput=throughput(trained),
        findings=[named.finding for named in findings],
        incidents=_incidents(summary),
        step_head=["step", *COLUMNS],
        steps=_steps(history),
        settings=yaml.safe_dump(settings, sort_keys=False, allow_unicode=True),
    )


def _void(num_steps: int) -> str:
    """Why curves begin late or have a gap."""
    if not num_steps:
        return ""
    were = "was" if num_steps == 1 else "were"
    return (
        f" {counted(num_steps, 'step')} {were} done again after a return to a checkpoint: the "
        "curves have their last time only."
    )


def _facts(spec: JobSpec) -> dict[str, str]:
    actors = spec.actors
    generators = f"{spec.most_actors * actors.generators_per_replica}"
    if spec.autoscale.enabled:
        generators = f"{actors.min_replicas * actors.generators_per_replica} to {generators}"
    return {
        "model": spec.model.uri,
        "task": spec.task.path.rpartition(":")[2],
        "loss": spec.algorithm.loss,
        "batch": f"{spec.algorithm.groups_per_step} x {spec.task.group_size}",
        "staleness policy": spec.staleness.policy,
        "generators": generators,
        "seed": str(spec.seed),
    }


def _digits(value: float) -> str:
    return f"{value:.3f}"


def _shown(summary: Mapping[str, Any], keys: str, form: Form = compact, between: str = "/") -> str:
    """Example: "0.25 / 3" for the keys "lag_mean lag_max"."""
    values = [summary.get(key) for key in keys.split()]
    return f" {between} ".join("-" if value is None else form(value) for value in values)


def _tiles(summary: Mapping[str, Any]) -> dict[str, str]:
    return {
        **_evaluated(summary),
        "reward, first → last steps (up to 5)": _shown(
            summary, "reward_first reward_last", _digits, "→"
        ),
        "steps": _shown(summary, "steps", str),
        "training time / wall time": _shown(summary, "training_seconds seconds", clock),
        "tokens generated per second, mean": _shown(summary, "tokens_per_second"),
        "lag in steps, mean / max": _shown(summary, "lag_mean lag_max"),
        "ESS, mean / min": _shown(summary, "ess_mean ess_min", _digits),
    }


def _evaluated(summary: Mapping[str, Any]) -> dict[str, str]:
    """One tile for each set, with the first of its pass@k."""
    tiles = {}
    for name, each in summary["evaluation"].items():
        k, now = next(iter(each["pass_at"].items()))
        if now["mean"] is None:
            continue
        before = each["first"]["pass_at"].get(k, {}).get("mean")
        is_first = before is None or each["first"]["step"] == each["step"]
        began = "" if is_first else f"{_digits(before)} → "
        interval = f"{_digits(now['low'])} to {_digits(now['high'])}"
        label = f"{name}, pass@{k} at step {each['step']}"
        tiles[label] = f"{began}{_digits(now['mean'])} ({interval})"
    return tiles


def _small_tiles(summary: Mapping[str, Any]) -> dict[str, str]:
    return {
        "in-flight updates": _shown(summary, "weight_updates", str),
        "pause per update, mean": _shown(summary, "pause_seconds_mean", duration),
        "transfer per update, mean": _shown(summary, "transfer_seconds_mean", duration),
        "tokens generated": _shown(summary, "tokens_generated"),
        "tokens trained": _shown(summary, "tokens_trained"),
        "tokens wasted": _shown(summary, "waste", "{:.1%}".format),
        "restarts": _shown(summary, "restarts", str),
    }


def _incidents(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    counts = [
        (f"{kind.replace('_', ' ')}: {reason}", str(count))
        for kind in INCIDENTS
        for reason, count in summary[kind].items()
    ]
    if summary["evaluations_failed"]:
        counts.append(("evaluations failed", str(summary["evaluations_failed"])))
    restarts = summary["restarts_by_process"].items()
    return [*counts, *((f"restarts: {name}", str(count)) for name, count in restarts)]


def _steps(history: RunHistory) -> list[list[str]]:
    """At most MAX_ROWS steps, evenly chosen, the last among them."""
    every = -(-len(history.steps) // MAX_ROWS) or 1
    chosen = history.steps[::-1][::every][::-1]
    return [
        [str(step.step), *(_cell(step.get(name)) for name in COLUMNS.values())] for step in chosen
    ]


def _cell(value: float) -> str:
    return compact(value) if value == value else "-"
