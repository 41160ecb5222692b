"""compare.html: the runs' curves in the same axes."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipelinerl_cli.compare.runs import SMOOTHING, Compared, Series, Variant
from pipelinerl_cli.compare.table import differences, evaluated, warning
from pipelinerl_cli.pages import render
from pipelinerl_cli.report.charts import plot
from pipelinerl_cli.report.figures import ESS, SAMPLES, STEPS, TIME, pass_at, rates, reward_axis
from pipelinerl_cli.report.svg import FRAME, NUM_COLOURS, Axis, Line
from pipelinerl_common.runs.history import Step


class Picture(NamedTuple):
    """One plot with a line per variant."""

    name: str
    """The name of the picture's file."""
    title: str
    x: Axis
    y: Axis | None
    """None for a reward's."""
    series: Callable[[Compared], Series]

    def of(self, variants: Sequence[Variant]) -> tuple[str, Axis, Axis, list[Line]]:
        """The arguments of `plot` and `svg_file`."""
        lines = [
            line
            for k, variant in enumerate(variants)
            for line in variant.lines(k % NUM_COLOURS, self.series)
        ]
        return self.title, self.x, reward_axis(lines) if self.y is None else self.y, lines


def _rewards(at: Callable[[Step], float]) -> Callable[[Compared], Series]:
    return lambda run: ([at(step) for step in run.history.steps], run.rewards)


def _of_steps(name: str) -> Callable[[Compared], Series]:
    def series(run: Compared) -> Series:
        steps = [step for step in run.history.steps if math.isfinite(step.get(name))]
        return [float(step.step) for step in steps], [step.get(name) for step in steps]

    return series


def _generated(run: Compared) -> Series:
    points = rates(run.history.gauge("actor", "tokens_generated_total"))
    return [point.t for point in points], [point.value for point in points]


TOKENS = Axis("tokens trained", low=0)
LEARNING = (
    Picture("reward-over-time", "Reward over time", TIME, None, _rewards(lambda step: step.t)),
    Picture(
        "reward-over-trajectories",
        "Reward over trajectories",
        SAMPLES,
        None,
        _rewards(lambda step: step.samples),
    ),
    Picture(
        "reward-over-tokens",
        "Reward over tokens",
        TOKENS,
        None,
        _rewards(lambda step: step.tokens),
    ),
)
BEHAVIOUR = (
    Picture("lag", "Largest lag per step (steps)", STEPS, Axis("lag", low=0), _of_steps("lag_max")),
    Picture("ess", "Effective sample size (1 is on-policy)", STEPS, ESS, _of_steps("ess")),
    Picture(
        "tokens-per-second",
        "Tokens generated per second",
        TIME,
        Axis("tokens/s", low=0),
        _generated,
    ),
)


def _evaluation(variants: Sequence[Variant], name: str, k: int) -> str:
    """One set's pass@k of every variant that has it."""

    def series(run: Compared) -> Series:
        found = [each for each in run.history.evaluations.get(name, ()) if k in each.pass_at]
        return [float(each.step) for each in found], [each.pass_at[k].mean for each in found]

    lines: list[Line] = []
    for number, variant in enumerate(variants):
        colour = number % NUM_COLOURS
        if len(variant.runs) > 1:
            lines += variant.lines(colour, series)
        else:
            results = variant.runs[0].history.evaluations.get(name, [])
            lines += pass_at(variant.label, results, k, colour)
    return plot(f"{name}: pass@{k}", STEPS, Axis("share of the prompts", low=0, high=1), lines)


def compare_page(
    variants: Sequence[Variant], head: Sequence[str], rows: Sequence[Sequence[str]], note: str
) -> str:
    """The whole page; `head`, `rows` and `note` are the table of numbers."""
    return render(
        "compare.html.j2",
        frame=FRAME,
        head=head,
        rows=rows,
        note=note,
        differences=differences(variants),
        warning=warning(variants),
        smoothing=SMOOTHING,
        has_seeds=any(len(variant.runs) > 1 for variant in variants),
        learning=[plot(*picture.of(variants)) for picture in LEARNING],
        evaluations=[_evaluation(variants, name, k) for name, k in evaluated(variants)],
        behaviour=[plot(*picture.of(variants)) for picture in BEHAVIOUR],
    )
