"""Charts: lines, bands, stacked areas, a heat map, stacked bars, the flow of tokens.

A chart of a page (`plot`, `heat`, `flow`) takes its colours from the page's style, and the page's
pointer script reads its values back from the drawn lines. A chart of its own (`svg_file`,
`bar_file`) holds title, keys and colours itself. The SVG is in templates. Drawn here and not by
altair, whose pages are ten times as large and whose package takes 33 MB.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from pipelinerl_cli.pages import render
from pipelinerl_cli.report.svg import (
    FRAME,
    HEIGHT,
    LEFT,
    RIGHT,
    WIDTH,
    Axis,
    Line,
    PlotScale,
    clock_ticks,
    compact,
    thin,
    ticks,
)
from pipelinerl_common.errors import SettingsError

MAX_COLUMNS = 150
"""More columns of a heat map are merged."""
FAINTEST = 0.01
"""Smaller shares are not drawn in a heat map."""
HEAD = 52
"""Height above the plot of a chart of its own, for the title and one row of keys."""
KEY, CHARACTER, GAP = 22, 6.4, 18
"""Widths of a key's stroke, of a character, and of the space between two keys."""
BAR_COLUMNS = 3
"""Panels in a row of `bar_file`."""


class Cell(NamedTuple):
    """A cell of a heat map, by its edges in values."""

    left: float
    right: float
    row: int
    share: float


@dataclass(frozen=True)
class Drawing:
    """One plot with its axes, as the templates draw it."""

    title: str
    x: Axis
    y: Axis
    scale: PlotScale
    x_ticks: Sequence[float]
    y_labels: Mapping[float, str]
    lines: Sequence[Line]
    cells: Sequence[Cell] = ()

    @property
    def frame(self) -> tuple[int, ...]:
        return FRAME

    @property
    def shown_x_ticks(self) -> list[float]:
        """Those in the picture: an axis may end before its last round number."""
        return [
            tick for tick in self.x_ticks if LEFT - 1 <= self.scale.x(tick) <= WIDTH - RIGHT + 1
        ]

    @property
    def description(self) -> str:
        """Says what the lines show to readers who cannot see them."""
        form = self.y.form
        described = [
            f"{line.label or self.y.label}: from {form(line.ys[0])} to {form(line.ys[-1])}, "
            f"between {form(min(line.ys))} and {form(max(line.ys))}."
            for line in self.lines
            if line.is_named
        ]
        return " ".join([f"{self.title}.", *described])


class Key(NamedTuple):
    """An entry of a legend. `at` is its place in a chart of its own."""

    style: str
    colour: int
    label: str
    at: float = 0.0


class Part(NamedTuple):
    """One piece of a bar. `colour` is the number of a page colour."""

    label: str
    value: float
    colour: int
    opacity: float = 1.0
    is_hatched: bool = False

    @property
    def fill(self) -> str:
        return f"url(#hatch{self.colour})" if self.is_hatched else f"var(--c{self.colour})"


class Bar(NamedTuple):
    """A stacked bar, its first part at the bottom. The note stands above it."""

    label: str
    parts: Sequence[Part]
    note: str

    @property
    def total(self) -> float:
        return sum(part.value for part in self.parts)


def plot(title: str, x: Axis, y: Axis, lines: Sequence[Line]) -> str:
    """One figure of a page. Without a finite point in any line it says so instead of drawing."""
    drawing = _drawing(title, x, y, lines)
    keys = [] if drawing is None else _keys(drawing.lines)
    keys = keys if len(keys) > 1 else []
    return render("figure.html.j2", title=title, keys=keys, drawing=drawing)


def heat(
    title: str,
    x: Axis,
    y: Axis,
    columns: Mapping[float, Sequence[float]],
    last_row: str,
    mean: Line,
) -> str:
    """One figure of a page: shares that add up to 1 in each column, darker where larger.

    `columns` are by their place on the x axis, ascending. Row k stands for the value k, the last
    one for `last_row`. `mean` is drawn over the cells.
    """
    if not columns:
        return render("figure.html.j2", title=title, keys=[], drawing=None)
    xs, shares = list(columns), list(columns.values())
    occurring = (k for column in shares for k, share in enumerate(column) if share >= FAINTEST)
    num_rows = max(3, 1 + max(occurring, default=0))
    width = (xs[-1] - xs[0]) / max(1, len(xs) - 1) or 1.0
    scale = PlotScale(xs[0] - width / 2, xs[-1] + width / 2, -0.5, num_rows - 0.5)
    places, merged = _merged(xs, shares)
    half = (xs[-1] - xs[0] + width) / len(places) / 2
    cells = [
        Cell(place - half, place + half, row, share)
        for place, column in zip(places, merged, strict=True)
        for row, share in enumerate(column)
        if share >= FAINTEST
    ]
    labels: dict[float, str] = {
        row: last_row if row == len(shares[0]) - 1 else y.form(row)
        for row in range(0, num_rows, max(1, num_rows // 6))
    }
    thin_xs, thin_ys = thin(mean.xs, mean.ys)
    over = replace(mean, xs=thin_xs, ys=thin_ys)
    x_ticks = ticks(scale.x0, scale.x1)
    drawing = Drawing(title, x, y, scale, x_ticks, labels, [over], cells)
    keys = [Key("heat", 0, "share of the tokens"), Key("line", mean.colour, "mean")]
    return render("figure.html.j2", title=title, keys=keys, drawing=drawing)


def flow(title: str, parts: Sequence[Part]) -> str:
    """One figure of a page: a bar whose pieces are as long as their values, with their numbers."""
    shown = [part for part in parts if part.value > 0]
    return render("flow.html.j2", title=title, parts=shown, compact=compact)


def svg_file(
    title: str,
    x: Axis,
    y: Axis,
    lines: Sequence[Line],
    mark: tuple[float, float] | None = None,
) -> str:
    """A chart of its own, with a ring around the point `mark`. Lines without a finite point are
    left out; without any line it says so.
    """
    drawing = _drawing(title, x, y, lines)
    keys = [] if drawing is None else _keys(drawing.lines)
    if keys and keys[-1].at + KEY + CHARACTER * len(keys[-1].label) > WIDTH - RIGHT:
        keys = []
    return render(
        "chart.svg.j2", title=title, head=HEAD, frame=FRAME, drawing=drawing, keys=keys, mark=mark
    )


def bar_file(title: str, y: Axis, panels: Mapping[str, Sequence[Bar]]) -> str:
    """A chart of its own with a panel for each name, all on one scale, and one legend."""
    top = max((bar.total for bars in panels.values() for bar in bars), default=1.0)
    y_ticks = ticks(0.0, top)
    drawn = {}
    for name, bars in panels.items():
        scale = PlotScale(0.0, max(1, len(bars)), 0.0, y_ticks[-1])
        labels = {tick: y.form(tick) for tick in y_ticks}
        drawn[name] = Drawing(name, Axis(""), y, scale, [], labels, []), bars
    parts = {part.label: part for bars in panels.values() for bar in bars for part in bar.parts}
    columns = min(BAR_COLUMNS, max(1, len(panels)))
    return render(
        "bars.svg.j2",
        title=title,
        head=HEAD,
        frame=FRAME,
        y=y,
        panels=drawn,
        columns=columns,
        width=columns * WIDTH,
        panel_height=HEIGHT + HEAD // 2,
        height=math.ceil(len(panels) / columns) * (HEIGHT + HEAD // 2),
        keys=list(zip(_places(list(parts)), parts.values(), strict=True)),
        hatched=sorted({part.colour for part in parts.values() if part.is_hatched}),
    )


def write_chart(path: Path, title: str, svg: str) -> None:
    """Writes a chart of its own for `--plot`. Raises SettingsError for a wrong name or place."""
    if path.suffix not in (".svg", ".html"):
        raise SettingsError(f"--plot {path}: must end in .svg or .html")
    text = render("chart.html.j2", title=title, svg=svg) if path.suffix == ".html" else svg
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--plot {path}: cannot be written: {error.strerror}") from error


def _drawing(title: str, x: Axis, y: Axis, lines: Sequence[Line]) -> Drawing | None:
    """None without a finite point."""
    shown = [line for line in map(_finite, lines) if line.xs]
    if not shown:
        return None
    shown.sort(key=lambda line: line.style != "band")  # no line is hidden below a band
    x_range = x.range_of([value for line in shown for value in line.xs])
    x_ticks = clock_ticks(*x_range) if x.kind == "clock" else ticks(*x_range)
    values = [value for line in shown for value in (*line.ys, *(line.floor or ()))]
    y_ticks = ticks(*y.range_of(values))
    # An axis with a fixed beginning ends with the data: no room on the right for a round number.
    end = x_ticks[-1] if x.low is None else max(max(line.xs) for line in shown) or 1.0
    scale = PlotScale(x_ticks[0], end, y_ticks[0], y_ticks[-1])
    return Drawing(title, x, y, scale, x_ticks, {tick: y.form(tick) for tick in y_ticks}, shown)


def _finite(line: Line) -> Line:
    if line.floor is not None:
        return line  # areas stand on one another: a value left out of one would tear the next
    pairs = zip(line.xs, line.ys, strict=True)
    finite = [(a, b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
    xs, ys = thin([a for a, _ in finite], [b for _, b in finite])
    return replace(line, xs=xs, ys=ys)


def _keys(lines: Sequence[Line]) -> list[Key]:
    named = [line for line in lines if line.is_named and line.label]
    places = _places([line.label for line in named])
    return [
        Key(line.style, line.colour, line.label, at) for line, at in zip(named, places, strict=True)
    ]


def _places(labels: Sequence[str]) -> list[float]:
    """Places of keys in one row."""
    places, at = [], float(LEFT)
    for label in labels:
        places.append(at)
        at += KEY + CHARACTER * len(label) + GAP
    return places


def _merged(
    xs: Sequence[float], columns: Sequence[Sequence[float]]
) -> tuple[list[float], list[list[float]]]:
    """At most MAX_COLUMNS columns, each the mean of those that it stands for."""
    count = min(MAX_COLUMNS, len(columns))
    places, merged = [], []
    for k in range(count):
        part = range(k * len(columns) // count, (k + 1) * len(columns) // count)
        places.append((xs[part[0]] + xs[part[-1]]) / 2)
        rows = zip(*(columns[i] for i in part), strict=True)
        merged.append([sum(row) / len(part) for row in rows])
    return places, merged
