"""The figures of a run's report: what it learns, how stale its tokens are, where its time goes."""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from pipelinerl_cli.report.charts import MAX_COLUMNS, Part, flow, heat, plot
from pipelinerl_cli.report.svg import MAX_POINTS, NUM_COLOURS, Axis, Line, smooth
from pipelinerl_common.metrics.catalog import MAX_LAG_BUCKET
from pipelinerl_common.runs.evaluations import Evaluated, Interval
from pipelinerl_common.runs.history import RunHistory, SeriesPoint, Step
from pipelinerl_common.runs.records import SESSION_ROLE

SMOOTHING, SMOOTHING_SHARE = 10, 0.01
"""Steps of the running mean that is drawn over a noisy per-step value: so many, or this share of a
long run's steps.
"""
PHASE_SMOOTHING = 5
TIME = Axis("training time", "clock", low=0)
SAMPLES = Axis("trajectories trained", low=0)
STEPS = Axis("step", low=0)
ESS = Axis("ESS", low=0.8, high=1)


class StepSeries(NamedTuple):
    """A per-step value of the trainer, as a line."""

    label: str
    name: str
    colour: int
    style: Literal["line", "dashed"] = "line"


class StepFigure(NamedTuple):
    """A figure of per-step values over training time."""

    title: str
    y: Axis
    series: Sequence[StepSeries]

    def draw(self, history: RunHistory) -> str:
        lines = [
            line
            for each in self.series
            for line in noisy(each.label, history.of_steps(each.name), each.colour, each.style)
        ]
        return plot(self.title, TIME, self.y, lines)


LOSS = StepFigure("Loss", Axis("loss"), [StepSeries("loss", "loss", 5)])
ENTROPY = StepFigure(
    "Entropy (nats per token)", Axis("entropy", low=0), [StepSeries("entropy", "entropy", 2)]
)
GRADIENT_SERIES = StepSeries("gradient norm", "grad_norm", 3)
GRADIENT = StepFigure("Gradient norm", Axis("value", low=0), [GRADIENT_SERIES])
GRADIENT_AND_KL = StepFigure(
    "Gradient norm and KL to the reference",
    Axis("value", low=0),
    [GRADIENT_SERIES, StepSeries("KL", "kl_ref", 1, "dashed")],
)
LENGTH = StepFigure(
    "Length of completions (tokens)",
    Axis("tokens", low=0),
    [StepSeries("completion", "completion_length_mean", 4)],
)
CLIPPED = StepFigure(
    "Share of the tokens whose importance ratio was clipped",
    Axis("share", low=0),
    [StepSeries("clipped", "clip_fraction", 1)],
)
SAMPLE_SIZE = StepFigure(
    "Effective sample size (1 is on-policy)",
    ESS,
    [StepSeries("raw", "ess", 2), StepSeries("truncated", "ess_truncated", 5, "dashed")],
)
UPDATES = StepFigure(
    "Pause and transfer of a weight update",
    Axis("time", "duration", low=0),
    [
        StepSeries("pause", "pause_seconds", 4),
        StepSeries("transfer", "transfer_seconds", 5, "dashed"),
    ],
)
PACKING = StepFigure(
    "Packing",
    Axis("share", low=0, high=1),
    [
        StepSeries("fill", "packing_fill", 0),
        StepSeries("imbalance", "packing_imbalance", 1, "dashed"),
    ],
)

PHASES = (
    ("waiting for samples", "wait_seconds", 1),
    ("training", "train_seconds", 2),
    ("publishing weights", "publish_seconds", 3),
)
"""Label, the trainer's value, colour; the rest of the step comes on top."""
SIZES: Sequence[StepSeries] = (
    StepSeries("desired", "actors_desired", 1, "dashed"),
    StepSeries("ready", "actors_ready", 0),
)
"""Values of the session, as they were at each step."""


def reward_over_time(history: RunHistory) -> str:
    reward = noisy("reward", history.of_steps("reward_mean"), 0)
    return plot("Reward over time", TIME, reward_axis(reward), reward)


def learning(history: RunHistory) -> list[str]:
    trained = {step.t: step.samples for step in history.steps}
    by_samples = [
        SeriesPoint(trained[point.t], point.value) for point in history.of_steps("reward_mean")
    ]
    reward = noisy("reward", by_samples, 0)
    gradient = GRADIENT_AND_KL if history.of_steps("kl_ref") else GRADIENT
    return [
        plot("Reward over trajectories", SAMPLES, reward_axis(reward), reward),
        *(figure.draw(history) for figure in (LOSS, ENTROPY, gradient, LENGTH, CLIPPED)),
    ]


def evaluation(history: RunHistory) -> list[str]:
    """Three figures for each evaluation set, over steps, with 95 % intervals as bands."""
    plots = []
    for name, points in history.evaluations.items():
        lines = []
        for number, k in enumerate(sorted({k for point in points for k in point.pass_at})):
            lines += pass_at(f"pass@{k}", points, k, number % NUM_COLOURS)
        rewards = {point.step: point.reward for point in points}
        reward = _band("reward", rewards, 2)
        lengths = [point.tokens_mean for point in points]
        tokens = Line("tokens", list(rewards), lengths, 4)
        plots += [
            plot(f"{name}: pass@k", STEPS, Axis("share of the prompts", low=0, high=1), lines),
            plot(f"{name}: reward", STEPS, reward_axis(reward), reward),
            plot(f"{name}: tokens per answer", STEPS, Axis("tokens", low=0), [tokens]),
        ]
    return plots


def staleness(history: RunHistory) -> list[str]:
    queues = [
        line(stage, history.gauge("preprocessor", f"queue_groups{{stage={stage}}}"), colour)
        for stage, colour in (("ready", 0), ("running", 1))
    ]
    return [
        _lags(history),
        SAMPLE_SIZE.draw(history),
        plot("Queue depth (groups)", TIME, Axis("groups", low=0), queues),
        flow("What became of the generated tokens", _fates(history)),
    ]


def throughput(history: RunHistory) -> list[str]:
    trained = [SeriesPoint(step.t, step.tokens) for step in history.steps]
    speeds = [
        line("generated", rates(history.gauge("actor", "tokens_generated_total")), 0),
        line("trained", rates(trained), 2),
    ]
    return [
        plot("Tokens per second", TIME, Axis("tokens/s", low=0), speeds),
        plot("Where a step's time goes", TIME, Axis("time", "duration", low=0), _phases(history)),
        UPDATES.draw(history),
        PACKING.draw(history),
        *_sizes(history),
    ]


def line(label: str, points: Sequence[SeriesPoint], colour: int) -> Line:
    return Line(label, [point.t for point in points], [point.value for point in points], colour)


def noisy(
    label: str,
    points: Sequence[SeriesPoint],
    colour: int,
    style: Literal["line", "dashed"] = "line",
) -> list[Line]:
    """The values faint, their running mean over them."""
    xs, ys = [point.t for point in points], [point.value for point in points]
    window = max(SMOOTHING, round(len(ys) * SMOOTHING_SHARE))
    mean = Line(label, xs, smooth(ys, window), colour, style)
    return [Line(f"{label}, each step", xs, ys, colour, "faint"), mean]


def reward_axis(lines: Sequence[Line]) -> Axis:
    """From 0 to 1 where all values are between these."""
    values = [value for line in lines for value in (*line.ys, *(line.floor or ()))]
    finite = [value for value in values if math.isfinite(value)]
    is_unit = bool(finite) and min(finite) >= 0 and max(finite) <= 1
    return Axis("reward", low=0.0, high=1.0) if is_unit else Axis("reward")


def pass_at(label: str, points: Sequence[Evaluated], k: int, colour: int) -> list[Line]:
    """pass@k of one set over steps, with its interval behind it."""
    found = {point.step: point.pass_at[k] for point in points if k in point.pass_at}
    return _band(label, found, colour)


def rates(total: Sequence[SeriesPoint], window_s: float = 5.0) -> list[SeriesPoint]:
    """Increase per second of a counter over windows of at least `window_s`; a decrease (a restart)
    counts as none.
    """
    points: list[SeriesPoint] = []
    last = total[0] if total else None
    for point in total[1:]:
        if last is not None and (seconds := point.t - last.t) >= window_s:
            points.append(SeriesPoint(point.t, max(0.0, point.value - last.value) / seconds))
            last = point
    return points


def _band(label: str, intervals: Mapping[int, Interval], colour: int) -> list[Line]:
    """Means over steps, behind them their intervals; a single point has none."""
    found = {step: interval for step, interval in intervals.items() if interval.is_finite}
    steps = list(found)
    low, mean, high = (
        [getattr(interval, edge) for interval in found.values()] for edge in ("low", "mean", "high")
    )
    behind = [Line(label, steps, high, colour, "band", floor=low)] if len(found) > 1 else []
    return [*behind, Line(label, steps, mean, colour)]


def _lags(history: RunHistory) -> str:
    steps = [step for step in history.steps if sum(step.tokens_by_lag) > 0]
    mean = [step for step in steps if math.isfinite(step.get("lag_mean"))]
    # A column of the picture is the mean of its steps; so is the line over it.
    means = smooth([step.get("lag_mean") for step in mean], max(1, len(mean) // MAX_COLUMNS))
    return heat(
        "Lag of the trained tokens (steps)",
        Axis("step"),
        Axis("lag", low=0),
        {step.step: _shares(step) for step in steps},
        f"{MAX_LAG_BUCKET + 1}+",
        Line("mean", [step.step for step in mean], means, 1),
    )


def _shares(step: Step) -> list[float]:
    return [count / sum(step.tokens_by_lag) for count in step.tokens_by_lag]


def _fates(history: RunHistory) -> list[Part]:
    """Tokens neither trained nor dropped were waiting or running when the run ended, or were lost
    with a process. Those of steps that were done again were trained, but for nothing.
    """
    generated = history.total("actor", "tokens_generated_total")
    trained = sum(step.values.get("num_trained_tokens", 0.0) for step in history.steps)
    dropped = history.totals_between("preprocessor", "tokens_dropped_total{reason=", "}")
    void = history.void_tokens
    rest = generated - trained - void - sum(dropped.values())
    return [
        Part("trained", trained, 2),
        *([Part("trained in steps that were done again", void, 1)] if void > 0 else []),
        *(
            Part(f"dropped: {reason.replace('_', ' ')}", count, 4)
            for reason, count in dropped.items()
        ),
        Part("waiting, running or lost at the end", max(0.0, rest), 5),
    ]


def _phases(history: RunHistory) -> list[Line]:
    """Areas that stand on one another, means of a few steps; together they are the step."""
    steps = [step for step in history.steps if step.get("step_seconds") >= 0]
    if not steps:
        return []
    known = [[max(0.0, step.values.get(name, 0.0)) for step in steps] for _, name, _ in PHASES]
    whole = [step.get("step_seconds") for step in steps]
    rest = [max(0.0, total - sum(parts)) for total, *parts in zip(whole, *known, strict=True)]
    every = -(-len(steps) // MAX_POINTS)
    window = max(PHASE_SMOOTHING, every)
    heights = [smooth(values, window)[::every] for values in (*known, rest)]
    xs = [step.t for step in steps][::every]
    tops = list(accumulate(heights, _added))
    floors = [[0.0] * len(xs), *tops[:-1]]
    labels = [(label, colour) for label, _, colour in PHASES] + [("rest", 5)]
    return [
        Line(label, xs, top, colour, "area", floor)
        for (label, colour), top, floor in zip(labels, tops, floors, strict=True)
    ]


def _added(below: list[float], own: list[float]) -> list[float]:
    return [a + b for a, b in zip(below, own, strict=True)]


def _sizes(history: RunHistory) -> list[str]:
    """The number of actors, where it changed."""
    lines = []
    for each in SIZES:
        if counts := dict(history.at_steps(SESSION_ROLE, each.name)):
            values = list(counts.values())
            lines.append(Line(each.label, list(counts), values, each.colour, each.style))
    if all(len(set(line.ys)) == 1 for line in lines):
        return []
    return [plot("Actors", Axis("step"), Axis("actors", low=0), lines)]
