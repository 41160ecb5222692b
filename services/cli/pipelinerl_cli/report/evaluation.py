"""Plots of what the evaluator found: one pair for each set, over steps, with the 95 % intervals as
bands.
"""

from collections.abc import Callable, Sequence

from pipelinerl_cli.report.learning import reward_axis
from pipelinerl_cli.report.svg import NUM_COLOURS, Axis, Line, plot
from pipelinerl_cli.results.evaluations import Evaluated, Interval
from pipelinerl_cli.results.history import RunHistory

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
