"""In which settings the jobs of compared runs differ, and whether their rewards can be compared.

compare.html: the runs' curves in the same axes.
"""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pipelinerl_cli.compare.runs import SMOOTHING, Compared, Series, Variant
from pipelinerl_cli.compare.table import evaluated
from pipelinerl_cli.report.charts import NUM_COLOURS, Axis, Line, plot
from pipelinerl_cli.report.figures import SAMPLES, STEPS, TIME, band, rates, reward_axis
from pipelinerl_cli.report.page import document, grid, section, table
from pipelinerl_cli.runs.folder import flat_settings
from pipelinerl_cli.runs.history import Step

SECTIONS = ("task", "model", "algorithm", "actors", "trainers", "weightTransfer")
"""Of the job file; the staleness policy and the seeds are rows of the numbers' table."""
MOST_COLUMNS = 60
OTHER_TASKS = (
    "WARNING: the runs have different tasks (task.path or task.args), so that rewards "
    "and times to a reward are not comparable."
)


def differences(variants: Sequence[Variant]) -> list[list[str]]:
    """A row for each setting that is not the same in all: its path, and each variant's value, "-"
    where it has none.
    """
    settings = [flat_settings(variant.runs[0].job) for variant in variants]
    paths = dict.fromkeys(path for each in settings for path in each)
    ordered = [path for section in SECTIONS for path in paths if path.partition(".")[0] == section]
    return [
        [path, *(_shown(each.get(path)) for each in settings)]
        for path in ordered
        if _differs(path, settings)
    ]


def warning(variants: Sequence[Variant]) -> str:
    """Empty where all runs have one task."""
    tasks = [variant.runs[0].job.spec.task for variant in variants]
    same = all((task.path, task.args) == (tasks[0].path, tasks[0].args) for task in tasks)
    return "" if same else OTHER_TASKS


def _differs(path: str, settings: Sequence[dict[str, Any]]) -> bool:
    return any(each.get(path) != settings[0].get(path) for each in settings)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MOST_COLUMNS else f"{text[: MOST_COLUMNS - 3]}..."


class Picture(NamedTuple):
    """One plot with a line per variant."""

    name: str
    """For a file."""
    title: str
    x: Axis
    y: Axis | None
    """None for a reward's."""
    series: Callable[[Compared], Series]

    def of(self, variants: Sequence[Variant]) -> tuple[str, Axis, Axis, list[Line]]:
        """As `plot` and `standalone` draw it."""
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
        Axis("tokens trained", low=0),
        None,
        _rewards(lambda step: step.tokens),
    ),
)
BEHAVIOUR = (
    Picture("lag", "Largest lag per step (steps)", STEPS, Axis("lag", low=0), _of_steps("lag_max")),
    Picture(
        "ess",
        "Effective sample size (1 is on-policy)",
        STEPS,
        Axis("ESS", low=0.8, high=1),
        _of_steps("ess"),
    ),
    Picture(
        "tokens-per-second",
        "Tokens generated per second",
        TIME,
        Axis("tokens/s", low=0),
        _generated,
    ),
)


EVALUATION = (
    "Of checkpoints on the jobs' evaluation sets. Bands of single runs: 95 % intervals "
    "over prompts."
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
            lines += band(
                variant.label,
                variant.runs[0].history.evaluations.get(name, []),
                lambda each: each.pass_at.get(k),
                colour,
            )
    return plot(f"{name}: pass@{k}", STEPS, Axis("share of the prompts", low=0, high=1), lines)


def compare_page(
    variants: Sequence[Variant], head: Sequence[str], rows: Sequence[Sequence[str]], note: str
) -> str:
    """The whole page; `head`, `rows` and `note` are the table."""
    learning, behaviour = (
        grid([plot(*picture.of(variants)) for picture in pictures])
        for pictures in (LEARNING, BEHAVIOUR)
    )
    evaluations = [_evaluation(variants, name, k) for name, k in evaluated(variants)]
    differing, warned = differences(variants), warning(variants)
    several = any(len(variant.runs) > 1 for variant in variants)
    curves = f"Rewards are means of {SMOOTHING} steps." + (
        " Lines: means over seeds; around them the lowest to the highest." * several
    )
    return document(
        "Runs compared - PipelineRL",
        "\n".join(
            [
                "<header><h1>Runs compared</h1></header>",
                *(
                    [
                        section(
                            "Settings that differ", warned, table(["setting", *head[1:]], differing)
                        )
                    ]
                    if differing
                    else []
                ),
                section("Numbers", note, table(head, rows)),
                section("Learning", curves, learning),
                *([section("Evaluation", EVALUATION, grid(evaluations))] if evaluations else []),
                section("Behaviour", "", behaviour),
            ]
        ),
    )
