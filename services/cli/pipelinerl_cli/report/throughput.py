"""Plots of what is generated and trained in a second, and who waits for whom."""

from itertools import accumulate
from typing import Literal

from pipelinerl_cli.report.learning import TIME, noisy
from pipelinerl_cli.report.staleness import line
from pipelinerl_cli.report.svg import MAX_POINTS, Axis, Line, plot, smooth
from pipelinerl_cli.results.history import Point, RunHistory
from pipelinerl_cli.results.metrics_file import SESSION_ROLE

SMOOTHING = 5
PHASES = (
    ("waiting for samples", "wait_seconds", 1),
    ("training", "train_seconds", 2),
    ("publishing weights", "publish_seconds", 3),
)
"""Label, the trainer's value, colour; what is left of the step comes on top."""

SIZES: tuple[tuple[str, str, int, Literal["line", "dashed"]], ...] = (
    ("desired", "actors_desired", 1, "dashed"),
    ("ready", "actors_ready", 0, "line"),
)
"""Label, the session's value, colour, style."""


def throughput(history: RunHistory) -> list[str]:
    return [
        plot(
            "Tokens per second",
            TIME,
            Axis("tokens/s", low=0),
            [
                line("generated", rates(history.gauge("actor", "tokens_generated_total")), 0),
                line("trained", rates([Point(step.t, step.tokens) for step in history.steps]), 2),
            ],
        ),
        plot("Where a step's time goes", TIME, Axis("time", "duration", low=0), _phases(history)),
        plot(
            "Pause and transfer of a weight update",
            TIME,
            Axis("time", "duration", low=0),
            [
                *noisy("pause", history.of_steps("pause_seconds"), 4),
                *noisy("transfer", history.of_steps("transfer_seconds"), 5, "dashed"),
            ],
        ),
        plot(
            "Packing",
            TIME,
            Axis("share", low=0, high=1),
            [
                *noisy("fill", history.of_steps("packing_fill"), 0),
                *noisy("imbalance", history.of_steps("packing_imbalance"), 1, "dashed"),
            ],
        ),
        *_scale(history),
    ]


def _scale(history: RunHistory) -> list[str]:
    """Where actors came or went."""
    lines = [
        Line(label, [step for step, _ in counted], [count for _, count in counted], colour, style)
        for label, name, colour, style in SIZES
        if (counted := history.at_steps(SESSION_ROLE, name))
    ]
    if all(len(set(line.ys)) == 1 for line in lines):
        return []
    return [plot("Actors", Axis("step"), Axis("actors", low=0), lines)]


def rates(total: list[Point], window_s: float = 5.0) -> list[Point]:
    """Increase per second of a counter over windows of at least `window_s`; a fall (a restart)
    counts as none.
    """
    points: list[Point] = []
    last = total[0] if total else None
    for point in total[1:]:
        if last is not None and point.t - last.t >= window_s:
            points.append(Point(point.t, max(0.0, point.value - last.value) / (point.t - last.t)))
            last = point
    return points


def _phases(history: RunHistory) -> list[Line]:
    """Areas that stand on one another, means of a few steps; together they are the step."""
    steps = [step for step in history.steps if step.get("step_seconds") >= 0]
    if not steps:
        return []
    known = [[max(0.0, step.values.get(name, 0.0)) for step in steps] for _, name, _ in PHASES]
    whole = [step.get("step_seconds") for step in steps]
    rest = [max(0.0, total - sum(parts)) for total, *parts in zip(whole, *known, strict=True)]
    every = -(-len(steps) // MAX_POINTS)
    heights = [smooth(values, max(SMOOTHING, every))[::every] for values in (*known, rest)]
    xs = [step.t for step in steps][::every]
    tops = list(
        accumulate(heights, lambda below, own: [a + b for a, b in zip(below, own, strict=True)])
    )
    floors = [[0.0] * len(xs), *tops[:-1]]
    labels = [(label, colour) for label, _, colour in PHASES] + [("rest", 5)]
    return [
        Line(label, xs, top, colour, "area", floor)
        for (label, colour), top, floor in zip(labels, tops, floors, strict=True)
    ]
