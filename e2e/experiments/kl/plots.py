"""The study's charts: one by lag and one by token for every start."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.kl.divergence import Estimate
from experiments.kl.study import Result
from pipelinerl_planner.line_chart import Axes, write_line_chart

_KL = "KL to on-policy, nats per token"


def write_plots(folder: Path, results: Sequence[Result]) -> None:
    """`kl-by-lag-<start>.svg` and `kl-by-token-<start>.svg`; the folder is made when it is not
    there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for result in results:
        start, schedule = result.start, result.schedule
        by_lag = Axes(
            f"Begun at step {start}, trained g steps later", "lag g (optimizer steps)", _KL
        )
        _write(folder / f"kl-by-lag-{start}.svg", by_lag, result.by_lag, 1)
        by_token = Axes(
            f"Begun at step {start}, trained at step {start + schedule.max_lag}", "token", _KL
        )
        _write(
            folder / f"kl-by-token-{start}.svg", by_token, result.by_token, schedule.interval, 0.5
        )


def _write(
    path: Path,
    axes: Axes,
    curves: Mapping[str, Sequence[Estimate]],
    width: int,
    offset: float = 0.0,
) -> None:
    """Estimates stand `width` apart, the first at `offset` times that."""
    lines, bands = {}, {}
    for name, curve in curves.items():
        xs = [(at + offset) * width for at in range(len(curve))]
        lines[name] = [(x, each.mean) for x, each in zip(xs, curve, strict=True)]
        bands[name] = [(x, each.low, each.high) for x, each in zip(xs, curve, strict=True)]
    write_line_chart(path, axes, lines, bands=bands)
