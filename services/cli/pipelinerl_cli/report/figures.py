"""Plots of what the policy learns.

Plots of how old the trained tokens are, and what that costs.

Plots of what is generated and trained in a second, and who waits for whom.

Plots of what the evaluator found: one pair for each set, over steps, with the 95 % intervals as
bands.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Literal

from pipelinerl_cli.report.charts import (
    MAX_POINTS,
    MOST_COLUMNS,
    NUM_COLOURS,
    Axis,
    Line,
    Part,
    flow,
    heat,
    plot,
    smooth,
)
from pipelinerl_cli.runs.evaluations import Evaluated, Interval
from pipelinerl_cli.runs.history import RunHistory, SeriesPoint, Step
from pipelinerl_cli.runs.records import SESSION_ROLE
from pipelinerl_common.metrics.catalog import MAX_LAG_BUCKET

SMOOTHING, SMOOTHING_SHARE = 10, 0.01
"""Steps of the running mean that is drawn over a noisy per-step value: so many, or this share of a
long run's steps.
"""
TIME = Axis("time training", "clock", low=0)
SAMPLES = Axis("trajectories trained", low=0)


def noisy(
    label: str, points: Sequence[SeriesPoint], colour: int, style: str = "line"
) -> list[Line]:
    """The values faint, their running mean over them."""
    xs, ys = [point.t for point in points], [point.value for point in points]
    mean = Line(
        label, xs, smooth(ys, window(len(ys))), colour, "dashed" if style == "dashed" else "line"
    )
    return [Line(f"{label}, each step", xs, ys, colour, "faint"), mean]


def window(num_steps: int) -> int:
    """Example: 10 of 60 steps, 50 of 5000."""
    return max(SMOOTHING, round(num_steps * SMOOTHING_SHARE))


def reward_axis(lines: Sequence[Line]) -> Axis:
    """From 0 to 1 where all values lie between."""
    values = [
        value for line in lines for value in (*line.ys, *(line.floor or ())) if math.isfinite(value)
    ]
    unit = bool(values) and min(values) >= 0 and max(values) <= 1
    return Axis("reward", low=0.0 if unit else None, high=1.0 if unit else None)


def over_time(history: RunHistory) -> str:
    reward = noisy("reward", history.of_steps("reward_mean"), 0)
    return plot("Reward over time", TIME, reward_axis(reward), reward)


def learning(history: RunHistory) -> list[str]:
    reward = history.of_steps("reward_mean")
    trained = {step.t: step.samples for step in history.steps}
    by_samples = noisy(
        "reward", [SeriesPoint(trained[point.t], point.value) for point in reward], 0
    )
    return [
        plot("Reward over trajectories", SAMPLES, reward_axis(by_samples), by_samples),
        plot("Loss", TIME, Axis("loss"), noisy("loss", history.of_steps("loss"), 5)),
        plot(
            "Entropy (nats per token)",
            TIME,
            Axis("entropy", low=0),
            noisy("entropy", history.of_steps("entropy"), 2),
        ),
        plot(
            "Gradient norm and KL to the reference"
            if history.of_steps("kl_ref")
            else "Gradient norm",
            TIME,
            Axis("value", low=0),
            [
                *noisy("gradient norm", history.of_steps("grad_norm"), 3),
                *noisy("KL", history.of_steps("kl_ref"), 1, "dashed"),
            ],
        ),
        plot(
            "Length of completions (tokens)",
            TIME,
            Axis("tokens", low=0),
            noisy("completion", history.of_steps("completion_length_mean"), 4),
        ),
        plot(
            "Share of the tokens whose importance ratio was clipped",
            TIME,
            Axis("share", low=0),
            noisy("clipped", history.of_steps("clip_fraction"), 1),
        ),
    ]


def staleness(history: RunHistory) -> list[str]:
    return [
        _lags(history),
        plot(
            "Effective sample size (1 is on-policy)",
            TIME,
            Axis("ESS", low=0.8, high=1),
            [
                *noisy("raw", history.of_steps("ess"), 2),
                *noisy("truncated", history.of_steps("ess_truncated"), 5, "dashed"),
            ],
        ),
        plot(
            "Queue depth (groups)",
            TIME,
            Axis("groups", low=0),
            [
                line("ready", history.gauge("preprocessor", "queue_groups{stage=ready}"), 0),
                line("running", history.gauge("preprocessor", "queue_groups{stage=running}"), 1),
            ],
        ),
        flow("What became of the generated tokens", _fates(history)),
    ]


def line(label: str, points: list[SeriesPoint], colour: int) -> Line:
    return Line(label, [point.t for point in points], [point.value for point in points], colour)


def _lags(history: RunHistory) -> str:
    steps = [step for step in history.steps if sum(step.tokens_by_lag) > 0]
    mean = [step for step in steps if step.get("lag_mean") == step.get("lag_mean")]
    return heat(
        "Lag of the trained tokens (steps)",
        Axis("step"),
        Axis("lag", low=0),
        [step.step for step in steps],
        [_shares(step) for step in steps],
        f"{MAX_LAG_BUCKET + 1}+",
        Line(
            "mean",
            [step.step for step in mean],
            _smoothed([step.get("lag_mean") for step in mean]),
            1,
        ),
    )


def _smoothed(values: list[float]) -> list[float]:
    """A column of the picture is the mean of its steps; so is the line."""
    return smooth(values, max(1, len(values) // MOST_COLUMNS))


def _shares(step: Step) -> list[float]:
    return [count / sum(step.tokens_by_lag) for count in step.tokens_by_lag]


def _fates(history: RunHistory) -> list[Part]:
    """What was neither trained nor dropped waited or ran when the run ended, or was lost with a
    process.
    """
    generated = history.total("actor", "tokens_generated_total")
    trained = sum(step.values.get("num_trained_tokens", 0.0) for step in history.steps)
    dropped = {
        name.removeprefix("tokens_dropped_total{reason=").removesuffix("}"): history.total(
            "preprocessor", name
        )
        for name in sorted(history.names("preprocessor"))
        if name.startswith("tokens_dropped_total{")
    }
    rest = generated - trained - sum(dropped.values())
    return [
        Part("trained", trained, 2),
        *(
            Part(f"dropped: {reason.replace('_', ' ')}", count, 4)
            for reason, count in dropped.items()
        ),
        Part("waiting, running or lost at the end", max(0.0, rest), 5),
    ]


PHASE_SMOOTHING = 5
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
                line(
                    "trained",
                    rates([SeriesPoint(step.t, step.tokens) for step in history.steps]),
                    2,
                ),
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


def rates(total: list[SeriesPoint], window_s: float = 5.0) -> list[SeriesPoint]:
    """Increase per second of a counter over windows of at least `window_s`; a fall (a restart)
    counts as none.
    """
    points: list[SeriesPoint] = []
    last = total[0] if total else None
    for point in total[1:]:
        if last is not None and point.t - last.t >= window_s:
            points.append(
                SeriesPoint(point.t, max(0.0, point.value - last.value) / (point.t - last.t))
            )
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
    heights = [smooth(values, max(PHASE_SMOOTHING, every))[::every] for values in (*known, rest)]
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


STEPS = Axis("step", low=0)


def evaluation(history: RunHistory) -> list[str]:
    plots = []
    for name, points in history.evaluations.items():
        ks = sorted({k for point in points for k in point.pass_at})
        lines = [
            line
            for number, k in enumerate(ks)
            for line in band(f"pass@{k}", points, _pass_at(k), number % NUM_COLOURS)
        ]
        plots.append(
            plot(f"{name}: pass@k", STEPS, Axis("share of the prompts", low=0, high=1), lines)
        )
        reward = band("reward", points, lambda point: point.reward, 2)
        plots.append(plot(f"{name}: reward", STEPS, reward_axis(reward), reward))
        tokens = Line(
            "tokens", [point.step for point in points], [point.tokens_mean for point in points], 4
        )
        plots.append(plot(f"{name}: tokens per answer", STEPS, Axis("tokens", low=0), [tokens]))
    return plots


def band(
    label: str,
    points: Sequence[Evaluated],
    value: Callable[[Evaluated], Interval | None],
    colour: int,
) -> list[Line]:
    """The interval behind its mean; a single point has none."""
    found = [
        (point.step, interval)
        for point in points
        if (interval := value(point)) is not None and interval.is_finite
    ]
    steps = [step for step, _ in found]
    low, high = [interval.low for _, interval in found], [interval.high for _, interval in found]
    behind = [Line(label, steps, high, colour, "band", floor=low)] if len(found) > 1 else []
    return [*behind, Line(label, steps, [interval.mean for _, interval in found], colour)]


def _pass_at(k: int) -> Callable[[Evaluated], Interval | None]:
    return lambda point: point.pass_at.get(k)
