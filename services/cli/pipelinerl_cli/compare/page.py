"""compare.html: the runs' curves in the same axes."""

from collections.abc import Callable, Sequence

from pipelinerl_cli.compare.table import SMOOTHING, Compared
from pipelinerl_cli.report.document import document, grid, section, table
from pipelinerl_cli.report.learning import SAMPLES
from pipelinerl_cli.report.svg import Axis, Line, plot
from pipelinerl_cli.report.throughput import rates
from pipelinerl_cli.results.history import Point, Step

NUM_COLOURS = 6
TIME = Axis("time", "clock", low=0)


def compare_page(runs: Sequence[Compared], head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The whole page; `head` and `rows` are the table."""
    tokens = Axis("tokens trained", low=0)
    learning = [
        _curves("Reward over time", TIME, runs, lambda step: step.t),
        _curves("Reward over trajectories", SAMPLES, runs, lambda step: step.samples),
        _curves("Reward over tokens", tokens, runs, lambda step: step.tokens),
    ]
    behaviour = [
        _series("Largest lag per step (steps)", Axis("lag", low=0), runs, lambda run: run.history.of_steps("lag_max")),
        _series("Effective sample size", Axis("ESS", low=0.8, high=1), runs, lambda run: run.history.of_steps("ess")),
        _series(
            "Tokens generated per second",
            Axis("tokens/s", low=0),
            runs,
            lambda run: rates(run.history.gauge("actor", "tokens_generated_total")),
        ),
    ]
    return document(
        "Runs compared - PipelineRL",
        "\n".join(
            [
                "<header><h1>Runs compared</h1></header>",
                table(*transposed(head, rows)),
                section("Learning", f"Rewards are means of {SMOOTHING} steps.", grid(learning)),
                section("Behaviour", "", grid(behaviour)),
            ]
        ),
    )


def transposed(head: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """A column per run and a line per number, so that any number of numbers fits."""
    lines = [[name, *(row[k] for row in rows)] for k, name in enumerate(head)]
    return lines[0], lines[1:]


def _curves(title: str, x: Axis, runs: Sequence[Compared], at: Callable[[Step], float]) -> str:
    lines = [
        Line(run.label, [at(step) for step in run.history.steps], run.rewards, k % NUM_COLOURS) for k, run in enumerate(runs)
    ]
    return plot(title, x, Axis("reward"), lines)


def _series(title: str, y: Axis, runs: Sequence[Compared], points: Callable[[Compared], list[Point]]) -> str:
    series = [(run.label, points(run)) for run in runs]
    lines = [
        Line(label, [point.t for point in each], [point.value for point in each], k % NUM_COLOURS)
        for k, (label, each) in enumerate(series)
    ]
    return plot(title, TIME, y, lines)
