"""Plots of what the policy learns."""

import math
from collections.abc import Sequence

from pipelinerl_cli.report.svg import Axis, Line, plot, smooth
from pipelinerl_cli.results.history import Point, RunHistory

SMOOTHING, SMOOTHING_SHARE = 10, 0.01
"""Steps of the running mean that is drawn over a noisy per-step value: so many, or this share of a
long run's steps.
"""
TIME = Axis("time training", "clock", low=0)
SAMPLES = Axis("trajectories trained", low=0)


def noisy(label: str, points: Sequence[Point], colour: int, style: str = "line") -> list[Line]:
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
    by_samples = noisy("reward", [Point(trained[point.t], point.value) for point in reward], 0)
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
