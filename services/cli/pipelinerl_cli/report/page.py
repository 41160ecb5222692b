"""The page around the plots: one HTML file that needs nothing else.

What `pipelinerl doctor` says of the run.

report.html of one run.

Writes summary.json and report.html from what a run's folder holds.
"""

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from pipelinerl_cli.doctor.facts import facts_of
from pipelinerl_cli.doctor.rules import Named, diagnose_run
from pipelinerl_cli.report.charts import clock, compact, duration
from pipelinerl_cli.report.figures import (
    SMOOTHING,
    evaluation,
    learning,
    over_time,
    staleness,
    throughput,
)
from pipelinerl_cli.runs.history import RunHistory, Step
from pipelinerl_common.files import write_whole
from pipelinerl_common.settings import Job, JobSpec


def document(title: str, body: str) -> str:
    """A whole page with the style and the pointer script inside."""
    here = files("pipelinerl_cli.report")
    style = "".join(
        here.joinpath(name).read_text(encoding="utf-8") for name in ("chart.css", "style.css")
    )
    script = here.joinpath("pointer.js").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>\n{style}</style></head>\n"
        f"<body><main>\n{body}\n</main><script>\n{script}</script></body></html>\n"
    )


def tiles(pairs: Iterable[tuple[str, str]], *, small: bool = False) -> str:
    """Numbers with their names, as (name, number)."""
    cells = (
        f"<div><dd>{html.escape(value)}</dd><dt>{html.escape(name)}</dt></div>"
        for name, value in pairs
    )
    return f'<dl class="tiles{" small" if small else ""}">{"".join(cells)}</dl>'


def hero(figure: str, beside: str) -> str:
    """The figure that matters most, large, with numbers beside it."""
    return f'<div class="hero">{figure}{beside}</div>'


def section(title: str, explanation: str, *parts: str) -> str:
    said = f'<p class="sub">{html.escape(explanation)}</p>' if explanation else ""
    return f"<section><h2>{html.escape(title)}</h2>{said}\n" + "\n".join(parts) + "</section>"


def grid(plots: Sequence[str]) -> str:
    return f'<div class="plots">{"".join(plots)}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return (
        '<div class="wide" '
        f'tabindex="0"><table>{row(head, "th")}{"".join(row(cells, "td") for cells in rows)}</table></div>'
    )


def folded(title: str, body: str) -> str:
    """`body` is markup."""
    return f"<details><summary>{html.escape(title)}</summary>{body}</details>"


def findings(found: Sequence[Named]) -> str:
    """The most severe first, each with what to turn."""
    if not found:
        return '<p class="sub">Nothing found.</p>'
    return f'<ul class="findings">{"".join(map(_item, found))}</ul>'


def _item(named: Named) -> str:
    finding = named.finding
    advice = "".join(f"<li>{html.escape(each)}</li>" for each in finding.turn)
    severity = html.escape(finding.severity.value)
    return (
        f'<li><span class="badge {severity}">{severity}</span> '
        f"{html.escape(finding.message)}<ul>{advice}</ul></li>"
    )


MOST_ROWS = 100
"""Of the table of steps."""
COLUMNS = (
    ("reward", "reward_mean"),
    ("loss", "loss"),
    ("gradient norm", "grad_norm"),
    ("entropy", "entropy"),
    ("ESS", "ess"),
    ("lag mean", "lag_mean"),
    ("lag max", "lag_max"),
    ("tokens", "num_trained_tokens"),
    ("waiting s", "wait_seconds"),
    ("step s", "step_seconds"),
)
LEARNING = (
    f"Faint: each step; bold: the mean of the last {SMOOTHING} steps, or of 1 % of a long run's. "
    "Time is that in which the run generated or trained, without the start-up of its sessions."
)
STALENESS = (
    "Generation never waits for training, so a token is trained some steps after it was sampled: "
    "its lag. "
    "The effective sample size is the share of the batch that is left when importance weights have "
    "made up for it."
)
FINDINGS = "What pipelinerl doctor makes of the run, and what to turn, the most promising first."
EVALUATION = (
    "Checkpoints on the job's evaluation sets, each at one version of the weights. pass@k: the "
    "chance that one of k answers "
    "passes. Bands: 95 % intervals over prompts."
)
THROUGHPUT = (
    "Who waits for whom: a trainer that waits long for samples wants more generators, a "
    "deep queue wants fewer."
)


def report_page(
    history: RunHistory, summary: Mapping[str, Any], job: Job, found: Sequence[Named]
) -> str:
    """The whole page. Plots without data say so; `found` are the doctor's findings."""
    trained = history.in_training_time()
    head = _head(summary, job)
    parts = [
        head,
        hero(over_time(trained), tiles(_first_numbers(summary))),
        tiles(_more_numbers(summary), small=True),
        section("Learning", LEARNING, grid(learning(trained))),
        *(
            [section("Evaluation", EVALUATION, grid(evaluation(history)))]
            if history.evaluations
            else []
        ),
        section("Staleness", STALENESS, grid(staleness(trained))),
        section("Throughput", THROUGHPUT, grid(throughput(trained))),
    ]
    parts.append(section("Findings", FINDINGS, findings(found)))
    if incidents := _incidents(summary):
        parts.append(section("Incidents", "", table(("what", "count"), incidents)))
    settings = yaml.safe_dump(
        job.model_dump(mode="json", by_alias=True), sort_keys=False, allow_unicode=True
    )
    numbers = table(("step", *(label for label, _ in COLUMNS)), _rows(history))
    parts.append(
        section(
            "Behind it",
            "",
            folded("Numbers of the steps", numbers),
            folded("job.yaml", f"<pre>{html.escape(settings)}</pre>"),
        )
    )
    return document(f"{job.name} - PipelineRL", "\n".join(parts))


def _head(summary: Mapping[str, Any], job: Job) -> str:
    spec = job.spec
    status = html.escape(str(summary["status"]))
    facts = (
        ("model", spec.model.uri),
        ("task", spec.task.path.rpartition(":")[2]),
        ("loss", spec.algorithm.loss),
        ("batch", f"{spec.algorithm.groups_per_step} x {spec.task.group_size}"),
        ("staleness policy", spec.staleness.policy),
        ("generators", _num_generators(spec)),
        ("seed", str(spec.seed)),
    )
    shown = "".join(
        f"<li><span>{html.escape(name)}</span> {html.escape(value)}</li>" for name, value in facts
    )
    title = f'<h1>{html.escape(job.name)} <span class="badge {status}">{status}</span></h1>'
    return f'<header>{title}<ul class="facts">{shown}</ul></header>'


def _num_generators(spec: JobSpec) -> str:
    """Example: "1 to 4" where actors come and go."""
    actors = spec.actors
    most = str(spec.most_actors * actors.generators_per_replica)
    return (
        f"{actors.min_replicas * actors.generators_per_replica} to {most}"
        if spec.autoscale.enabled
        else most
    )


def _shown(summary: Mapping[str, Any], key: str, form: Any = compact) -> str:
    value = summary.get(key)
    return "-" if value is None else str(form(value))


def _digits(value: float) -> str:
    return f"{value:.3f}"


def _first_numbers(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        *_evaluated(summary),
        (
            "reward, first → last steps (up to 5)",
            f"{_shown(summary, 'reward_first', _digits)} → "
            f"{_shown(summary, 'reward_last', _digits)}",
        ),
        ("steps", _shown(summary, "steps", str)),
        (
            "time training, of all",
            f"{_shown(summary, 'training_seconds', clock)} / {_shown(summary, 'seconds', clock)}",
        ),
        ("tokens generated per second, mean", _shown(summary, "tokens_per_second")),
        (
            "lag in steps, mean / max",
            f"{_shown(summary, 'lag_mean')} / {_shown(summary, 'lag_max')}",
        ),
        (
            "ESS, mean / min",
            f"{_shown(summary, 'ess_mean', _digits)} / {_shown(summary, 'ess_min', _digits)}",
        ),
    ]


def _evaluated(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """One for each set, with the first of its pass@k."""
    numbers = []
    for name, each in summary["evaluation"].items():
        k, now = next(iter(each["pass_at"].items()))
        before = each["first"]["pass_at"].get(k, {}).get("mean")
        if now["mean"] is None:
            continue
        shown = f"{_digits(now['mean'])} ({_digits(now['low'])} to {_digits(now['high'])})"
        began = (
            ""
            if before is None or each["first"]["step"] == each["step"]
            else f"{_digits(before)} → "
        )
        numbers.append((f"{name}, pass@{k} at step {each['step']}", began + shown))
    return numbers


def _more_numbers(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("in-flight updates", _shown(summary, "weight_updates", str)),
        ("pause per update, mean", _shown(summary, "pause_seconds_mean", duration)),
        ("transfer per update, mean", _shown(summary, "transfer_seconds_mean", duration)),
        ("tokens generated", _shown(summary, "tokens_generated")),
        ("tokens trained", _shown(summary, "tokens_trained")),
        ("of them never trained", _shown(summary, "waste", lambda value: f"{value:.1%}")),
        ("restarts", _shown(summary, "restarts", str)),
    ]


def _incidents(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    counts = [
        (f"dropped groups: {reason}", str(count))
        for reason, count in summary["dropped_groups"].items()
    ]
    counts += [
        (f"rollout errors: {reason}", str(count))
        for reason, count in summary["rollout_errors"].items()
    ]
    counts += [
        (f"evaluations skipped: {reason}", str(count))
        for reason, count in summary["evaluations_skipped"].items()
    ]
    if summary["evaluations_failed"]:
        counts.append(("evaluations failed", str(summary["evaluations_failed"])))
    return counts + [
        (f"restarts: {name}", str(count)) for name, count in summary["restarts_by_process"].items()
    ]


def _rows(history: RunHistory) -> list[list[str]]:
    """At most MOST_ROWS steps, evenly chosen, the last among them."""
    steps: list[Step] = history.steps
    every = -(-len(steps) // MOST_ROWS) or 1
    return [
        [str(step.step), *(_cell(step.get(name)) for _, name in COLUMNS)]
        for step in steps[::-1][::every][::-1]
    ]


def _cell(value: float) -> str:
    return compact(value) if value == value else "-"


def write_results(root: Path, job: Job, status: str, failure: str = "") -> dict[str, Any]:
    """Returns the summary; in the file `failure` is added to it, in one line why the run failed.

    Raises SettingsError when metrics.jsonl cannot be read, OSError when something cannot be
    written.
    """
    facts = facts_of(root, job, status, failure=failure)
    document = {**facts.summary, **({"failure": failure} if failure else {})}
    write_whole(root / "summary.json", json.dumps(document, indent=2, allow_nan=False) + "\n")
    write_whole(
        root / "report.html", report_page(facts.history, facts.summary, job, diagnose_run(facts))
    )
    return facts.summary
