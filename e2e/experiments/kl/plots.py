"""The study's charts: one by lag and one by token for every start."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.kl.divergence import Estimate
from experiments.kl.study import Result
from pipelinerl_cli.report.charts import svg_file, write_chart
from pipelinerl_cli.report.svg import Axis, Line

KL = Axis("KL to on-policy, nats per token", low=0, cuts=True)


def write_plots(folder: Path, results: Sequence[Result]) -> None:
    """`kl-by-lag-<start>.svg` and `kl-by-token-<start>.svg`; the folder is made when it is not
    there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for result in results:
        start, schedule = result.start, result.schedule
        _write(
            folder / f"kl-by-lag-{start}.svg",
            f"Begun at step {start}, trained g steps later",
            "lag g (optimizer steps)",
            result.by_lag,
        )
        _write(
            folder / f"kl-by-token-{start}.svg",
            f"Begun at step {start}, trained at step {start + schedule.max_lag}",
            "token",
            result.by_token,
            width=schedule.interval,
            offset=0.5,
        )


def _write(
    path: Path,
    title: str,
    x: str,
    curves: Mapping[str, Sequence[Estimate]],
    width: int = 1,
    offset: float = 0.0,
) -> None:
    """Estimates stand `width` apart, the first at `offset` times that, with their intervals."""
    lines = []
    for colour, (name, curve) in enumerate(curves.items()):
        xs = [(at + offset) * width for at in range(len(curve))]
        low, mean, high = (
            [getattr(each, edge) for each in curve] for edge in ("low", "mean", "high")
        )
        lines += [Line(name, xs, high, colour, "band", low), Line(name, xs, mean, colour)]
    write_chart(path, title, svg_file(title, Axis(x, low=0), KL, lines))
