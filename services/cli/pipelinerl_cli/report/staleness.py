"""Plots of how old the trained tokens are, and what that costs."""

from pipelinerl_cli.report.flow import Part, flow
from pipelinerl_cli.report.heat import MOST_COLUMNS, heat
from pipelinerl_cli.report.learning import TIME, noisy
from pipelinerl_cli.report.svg import Axis, Line, plot, smooth
from pipelinerl_cli.results.history import Point, RunHistory, Step
from pipelinerl_common.metrics.catalog.learning import MAX_LAG_BUCKET


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


def line(label: str, points: list[Point], colour: int) -> Line:
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
