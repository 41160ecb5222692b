"""report.html of one run."""

import html
import math
from collections.abc import Mapping
from typing import Any

import yaml

from pipelinerl_cli.report.document import document, folded, grid, section, table, tiles
from pipelinerl_cli.report.svg import Axis, Line, clock, compact, duration, plot, smooth
from pipelinerl_cli.results.history import Point, RunHistory
from pipelinerl_common.settings import Job

SMOOTHING = 10
"""Steps of the running mean that is drawn over a noisy per-step value."""
TIME = Axis("time", "clock", low=0)
SAMPLES = Axis("trajectories trained", low=0)


def report_page(history: RunHistory, summary: Mapping[str, Any], job: Job) -> str:
    """The whole page. Plots without data say so."""
    status = str(summary["status"])
    head = (
        f'<h1>{html.escape(job.name)}<span class="badge {html.escape(status)}">{html.escape(status)}</span></h1>'
        f'<p class="sub">{html.escape(_subtitle(job))}</p>'
    )
    parts = [
        head,
        tiles(_numbers(summary)),
        section("Learning", grid(_learning(history))),
        section("Asynchrony", grid(_asynchrony(history))),
        section("Throughput", grid(_throughput(history))),
    ]
    counts = [(f"dropped groups: {reason}", str(count)) for reason, count in summary["dropped_groups"].items()]
    counts += [(f"rollout errors: {reason}", str(count)) for reason, count in summary["rollout_errors"].items()]
    counts += [(f"restarts: {name}", str(count)) for name, count in summary["restarts_by_process"].items()]
    if counts:
        parts.append(section("Incidents", table(("what", "count"), counts)))
    settings = yaml.safe_dump(job.model_dump(mode="json", by_alias=True), sort_keys=False, allow_unicode=True)
    parts.append(section("Settings", folded("job.yaml", settings)))
    return document(f"{job.name} - PipelineRL", "\n".join(parts))


def _subtitle(job: Job) -> str:
    spec = job.spec
    return (
        f"{spec.model.uri}, {spec.task.path}, {spec.algorithm.loss}, {spec.algorithm.groups_per_step} groups of "
        f"{spec.task.group_size} per step, staleness policy {spec.staleness.policy}, "
        f"{spec.actors.replicas * spec.actors.generators_per_replica} generator(s), seed {spec.seed}"
    )


def _numbers(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    def shown(key: str, form: Any = compact) -> str:
        value = summary.get(key)
        return "-" if value is None else str(form(value))

    def digits(value: float) -> str:
        return f"{value:.3f}"

    return [
        ("reward, first 5 → last 5 steps", f"{shown('reward_first', digits)} → {shown('reward_last', digits)}"),
        ("steps", shown("steps", str)),
        ("time", shown("seconds", clock)),
        ("in-flight weight updates", shown("weight_updates", str)),
        ("pause per update", shown("pause_seconds_mean", duration)),
        ("transfer per update", shown("transfer_seconds_mean", duration)),
        ("lag, mean / max (steps)", f"{shown('lag_mean')} / {shown('lag_max')}"),
        ("ESS, mean / min", f"{shown('ess_mean', digits)} / {shown('ess_min', digits)}"),
        ("tokens generated per second", shown("tokens_per_second")),
        ("tokens generated / trained", f"{shown('tokens_generated')} / {shown('tokens_trained')}"),
        ("generated but not trained", shown("waste", lambda value: f"{value:.1%}")),
        ("restarts", shown("restarts", str)),
    ]


def _learning(history: RunHistory) -> list[str]:
    steps = history.steps
    reward = [step.get("reward_mean") for step in steps]
    finite = [k for k, value in enumerate(reward) if math.isfinite(value)]
    values = [reward[k] for k in finite]
    mean = smooth(values, SMOOTHING)
    high = 1.0 if values and min(values) >= 0 and max(values) <= 1 else None
    axis = Axis("reward", low=0.0 if high else None, high=high)

    def curve(title: str, x: Axis, xs: list[float]) -> str:
        own = [xs[k] for k in finite]
        return plot(title, x, axis, [Line("step", own, values, 0, "faint"), Line(f"mean of {SMOOTHING} steps", own, mean, 0)])

    return [
        curve("Reward over time", TIME, [step.t for step in steps]),
        curve("Reward over trajectories", SAMPLES, [step.samples for step in steps]),
        plot("Loss", TIME, Axis("loss"), [_line("loss", history.of_steps("loss"), 5)]),
        plot(
            "Gradient norm and entropy",
            TIME,
            Axis("value", low=0),
            [
                _line("gradient norm", history.of_steps("grad_norm"), 3),
                _line("entropy", history.of_steps("entropy"), 2),
                _line("KL to reference", history.of_steps("kl_ref"), 1),
            ],
        ),
    ]


def _asynchrony(history: RunHistory) -> list[str]:
    return [
        plot(
            "Lag of trained tokens (steps)",
            TIME,
            Axis("lag", low=0),
            [_line("mean", history.of_steps("lag_mean"), 0), _line("max", history.of_steps("lag_max"), 1, "dashed")],
        ),
        plot(
            "Effective sample size",
            TIME,
            Axis("ESS", low=0.8, high=1),
            [_line("raw", history.of_steps("ess"), 2), _line("truncated", history.of_steps("ess_truncated"), 5, "dashed")],
        ),
        plot(
            "Queue depth (groups)",
            TIME,
            Axis("groups", low=0),
            [
                _line("ready", history.gauge("preprocessor", "groups_ready"), 0),
                _line("running", history.gauge("preprocessor", "groups_running"), 1),
            ],
        ),
        plot(
            "Weight update",
            TIME,
            Axis("time", "duration", low=0),
            [
                _line("pause", history.of_steps("pause_seconds"), 4),
                _line("transfer", history.of_steps("transfer_seconds"), 5, "dashed"),
            ],
        ),
    ]


def _throughput(history: RunHistory) -> list[str]:
    return [
        plot(
            "Tokens per second",
            TIME,
            Axis("tokens/s", low=0),
            [
                _line("generated", rates(history.gauge("actor", "tokens_generated_total")), 0),
                _line("trained", _trained_rate(history), 2),
            ],
        ),
        plot(
            "Where a step's time goes",
            TIME,
            Axis("time", "duration", low=0),
            [
                _line("step", history.of_steps("step_seconds"), 5, "dashed"),
                _line("training", history.of_steps("train_seconds"), 2),
                _line("waiting for samples", history.of_steps("wait_seconds"), 1),
            ],
        ),
    ]


def rates(total: list[Point], window_s: float = 5.0) -> list[Point]:
    """Increase per second of a counter over windows of at least `window_s`; a fall (a restart) counts as none."""
    points: list[Point] = []
    last = total[0] if total else None
    for point in total[1:]:
        if last is not None and point.t - last.t >= window_s:
            points.append(Point(point.t, max(0.0, point.value - last.value) / (point.t - last.t)))
            last = point
    return points


def _trained_rate(history: RunHistory) -> list[Point]:
    return rates([Point(step.t, step.tokens) for step in history.steps])


def _line(label: str, points: list[Point], colour: int, style: Any = "line") -> Line:
    return Line(label, [point.t for point in points], [point.value for point in points], colour, style)
