"""Charts as SVG text: lines, bands, stacked areas, a heat map, stacked bars, the flow of tokens.

A chart of a page (`plot`, `heat`, `flow`) takes its colours from the page's style, and the page's
pointer script reads its values back from the drawn lines. A chart of its own (`svg_file`,
`bar_file`) holds title, keys and colours itself. Drawn by hand: a page of altair's is ten times as
large, loads a 33 MB package, and looks like every other one.
"""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pipelinerl_cli.pages import render
from pipelinerl_cli.report.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Line,
    PlotScale,
    clock_ticks,
    compact,
    element,
    text_at,
    thin,
    ticks,
)
from pipelinerl_common.errors import SettingsError

MAX_COLUMNS = 150
"""Of a heat map."""
FAINTEST = 0.01
"""Smaller shares are not drawn in a heat map."""

HEAD = 52
"""Height above the plot of a chart of its own, for the title and one row of keys."""
KEY, CHARACTER, GAP = 22, 6.4, 18
"""Widths of a key's stroke, of a character, and of the space between two keys."""
BAR_COLUMNS = 3
"""Panels in a row of `bar_file`."""


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
    shown = drawable(lines)
    keys = [(line.style, line.colour, line.label) for line in shown if line.is_named and line.label]
    if not shown:
        return _figure(title, [], "")
    scale, parts = _draw(x, y, shown)
    return _figure(title, keys if len(keys) > 1 else [], _picture(title, scale, x, y, parts, shown))


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
        return _figure(title, [], "")
    xs, shares = list(columns), list(columns.values())
    occurring = (k for column in shares for k, share in enumerate(column) if share >= FAINTEST)
    num_rows = max(3, 1 + max(occurring, default=0))
    width = (xs[-1] - xs[0]) / max(1, len(xs) - 1) or 1.0
    scale = PlotScale(xs[0] - width / 2, xs[-1] + width / 2, -0.5, num_rows - 0.5)
    places, merged = _merged(xs, shares)
    wide = (xs[-1] - xs[0] + width) / len(places)
    over = replace(mean, **dict(zip(("xs", "ys"), thin(mean.xs, mean.ys), strict=True)))
    labels = {
        row: last_row if row == len(shares[0]) - 1 else y.form(row)
        for row in range(0, num_rows, max(1, num_rows // 6))
    }
    parts = [
        *(_y_label(scale, row, label) for row, label in labels.items()),
        _x_axis(scale, x, ticks(scale.x0, scale.x1)),
        element("line", class_="base", x1=LEFT, x2=LEFT, y1=TOP, y2=HEIGHT - BOTTOM),
        *(
            _cell(scale, place, wide, row, share)
            for place, column in zip(places, merged, strict=True)
            for row, share in enumerate(column)
            if share >= FAINTEST
        ),
        _draw_line(scale, over),
    ]
    keys = [("heat", 0, "share of the tokens"), ("line", mean.colour, "mean")]
    return _figure(title, keys, _picture(title, scale, x, y, parts, [over]))


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
    shown = drawable(lines)
    parts = [text_at("no data", WIDTH / 2, HEIGHT / 2, "middle")]
    if shown:
        scale, parts = _draw(x, y, shown)
        if mark is not None:
            cx, cy = scale.x(mark[0]), scale.y(mark[1])
            parts.append(element("circle", class_="mark", cx=cx, cy=cy, r=5))
    keys = _keys([line for line in shown if line.is_named and line.label])
    y_label = text_at(y.label, WIDTH - RIGHT, -9, "end")
    return _file(title, WIDTH, HEIGHT, [*keys, y_label, *parts])


def bar_file(title: str, y: Axis, panels: Mapping[str, Sequence[Bar]]) -> str:
    """A chart of its own with a panel for each name, all on one scale, and one legend."""
    top = max((bar.total for bars in panels.values() for bar in bars), default=1.0)
    y_ticks = ticks(0.0, top)
    columns, height = min(BAR_COLUMNS, max(1, len(panels))), HEIGHT + HEAD / 2
    drawn = [
        element(
            "g",
            text_at(name, LEFT, -4, class_="title"),
            *_bars(y, y_ticks, bars),
            transform=f"translate({k % columns * WIDTH},{k // columns * height + HEAD / 2:g})",
        )
        for k, (name, bars) in enumerate(panels.items())
    ]
    parts = {part.label: part for bars in panels.values() for bar in bars for part in bar.parts}
    hatched = {part.colour for part in parts.values() if part.is_hatched}
    hatches = [render("hatch.svg.j2", colour=colour) for colour in sorted(hatched)]
    rows = math.ceil(len(panels) / columns)
    legend = _part_keys(parts.values())
    return _file(title, columns * WIDTH, rows * height, [*hatches, legend, *drawn])


def write_chart(path: Path, title: str, svg: str) -> None:
    """Writes a chart of its own for `--plot`. Raises SettingsError for a wrong name or place."""
    if path.suffix not in (".svg", ".html"):
        raise SettingsError(f"--plot {path}: must end in .svg or .html")
    head = f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title>"
    try:
        path.write_text(f"{head}{svg}" if path.suffix == ".html" else svg, encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--plot {path}: cannot be written: {error.strerror}") from error


def drawable(lines: Sequence[Line]) -> list[Line]:
    """The lines that have a finite point, with no more points than a picture shows. Bands come
    first, so that no line is hidden below one.
    """
    shown = [line for line in map(_finite, lines) if line.xs]
    return sorted(shown, key=lambda line: line.style != "band")


def _finite(line: Line) -> Line:
    if line.floor is not None:
        return line  # areas stand on one another: a value left out of one would tear the next
    pairs = zip(line.xs, line.ys, strict=True)
    finite = [(a, b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
    xs, ys = thin([a for a, _ in finite], [b for _, b in finite])
    return replace(line, xs=xs, ys=ys)


def _draw(x: Axis, y: Axis, lines: Sequence[Line]) -> tuple[PlotScale, list[str]]:
    """The scale and the parts of a picture of at least one drawable line."""
    x_range = x.range_of([value for line in lines for value in line.xs])
    x_ticks = clock_ticks(*x_range) if x.kind == "clock" else ticks(*x_range)
    values = [value for line in lines for value in (*line.ys, *(line.floor or ()))]
    y_ticks = ticks(*y.range_of(values))
    # An axis with a fixed beginning ends with the data: no room on the right for a round number.
    end = x_ticks[-1] if x.low is None else max(max(line.xs) for line in lines) or 1.0
    scale = PlotScale(x_ticks[0], end, y_ticks[0], y_ticks[-1])
    grid = [_y_grid(scale, y, y_ticks), _x_axis(scale, x, x_ticks)]
    return scale, [*grid, *(_draw_line(scale, line) for line in lines)]


def _draw_line(scale: PlotScale, line: Line) -> str:
    points = scale.points(line.xs, line.ys)
    colour = f"c{line.colour}"
    if len(points) == 1:
        cx, cy = map(float, points[0].split(","))
        return element(
            "circle", class_=f"dot {colour}", cx=cx, cy=cy, r="2.5", data_label=line.label
        )
    edge = " ".join(points)
    if line.floor is None:
        return element(
            "polyline", class_=f"{line.style} {colour}", points=edge, data_label=line.label
        )
    outline = f"{edge} {' '.join(reversed(scale.points(line.xs, line.floor)))}"
    polygon = element("polygon", class_=f"{line.style} {colour}", points=outline)
    if line.style == "band":
        return polygon
    return polygon + element(
        "polyline", class_=f"edge {colour}", points=edge, data_label=line.label, data_stacked=True
    )


def _y_grid(scale: PlotScale, y: Axis, y_ticks: Sequence[float]) -> str:
    return "".join(
        element(
            "line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=scale.y(tick), y2=scale.y(tick)
        )
        + _y_label(scale, tick, y.form(tick))
        for tick in y_ticks
    )


def _y_label(scale: PlotScale, value: float, label: str) -> str:
    return text_at(label, LEFT - 6, scale.y(value) + 3.5, "end")


def _x_axis(scale: PlotScale, x: Axis, x_ticks: Sequence[float]) -> str:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for tick in x_ticks:
        if LEFT - 1 <= (at := scale.x(tick)) <= right + 1:
            parts.append(
                element("line", class_="tick", x1=at, x2=at, y1=bottom, y2=bottom + 4)
                + text_at(x.form(tick), at, bottom + 16, "middle")
            )
    parts.append(text_at(x.label, right, HEIGHT - 4, "end", class_="axis"))
    parts.append(element("line", class_="base", x1=LEFT, x2=right, y1=bottom, y2=bottom))
    return "".join(parts)


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


def _cell(scale: PlotScale, x: float, width: float, row: int, share: float) -> str:
    left, right = scale.x(x - width / 2), scale.x(x + width / 2)
    top, bottom = scale.y(row + 0.5), scale.y(row - 0.5)
    return element(
        "rect",
        class_="cell",
        x=left,
        y=top + 0.5,
        width=right - left + 0.3,
        height=bottom - top - 1,
        fill_opacity=f"{share**0.6:.2f}",
    )


def _bars(y: Axis, y_ticks: Sequence[float], bars: Sequence[Bar]) -> list[str]:
    scale = PlotScale(0.0, max(1, len(bars)), 0.0, y_ticks[-1])
    parts = [_y_grid(scale, y, y_ticks)]
    for k, bar in enumerate(bars):
        left, right, height = scale.x(k + 0.15), scale.x(k + 0.85), 0.0
        for part in bar.parts:
            top, bottom = scale.y(height + part.value), scale.y(height)
            height += part.value
            parts.append(
                element(
                    "rect",
                    element("title", html.escape(f"{part.label}: {y.form(part.value)} {y.label}")),
                    x=left,
                    y=top,
                    width=right - left,
                    height=bottom - top,
                    fill=part.fill,
                    fill_opacity=f"{part.opacity:.2f}",
                )
            )
        middle = (left + right) / 2
        parts.append(text_at(bar.note, middle, scale.y(height) - 3, "middle"))
        parts.append(text_at(bar.label, middle, HEIGHT - BOTTOM + 16, "middle"))
    return parts


def _figure(title: str, keys: Sequence[tuple[str, int, str]], picture: str) -> str:
    return render("figure.html.j2", title=title, keys=keys, picture=picture)


def _picture(
    title: str,
    scale: PlotScale,
    x: Axis,
    y: Axis,
    parts: Sequence[str],
    lines: Sequence[Line],
) -> str:
    """The drawing, its description for readers who cannot see it, and the pointer script's data."""
    described = [
        f"{line.label or y.label}: from {y.form(line.ys[0])} to {y.form(line.ys[-1])}, "
        f"between {y.form(min(line.ys))} and {y.form(max(line.ys))}."
        for line in lines
        if line.is_named
    ]
    pointer = element("line", y1=TOP, y2=HEIGHT - BOTTOM)
    edges = {"data_x0": scale.x0, "data_x1": scale.x1, "data_y0": scale.y0, "data_y1": scale.y1}
    return element(
        "svg",
        *parts,
        element("g", pointer, class_="pointer", visibility="hidden"),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        tabindex=0,
        aria_label=" ".join([f"{title}.", *described]),
        data_plot=True,
        **{name: f"{value:.8g}" for name, value in edges.items()},
        data_x_kind=x.kind,
        data_y_kind=y.kind,
    )


def _keys(lines: Sequence[Line]) -> list[str]:
    """One row above the plot; none when it would not fit."""
    at, parts = float(LEFT), []
    for line in lines:
        style = f"key {line.style} c{line.colour}"
        parts.append(element("line", class_=style, x1=at, x2=at + KEY - 6, y1=-13, y2=-13))
        parts.append(text_at(line.label, at + KEY, -9))
        at += KEY + CHARACTER * len(line.label) + GAP
    return parts if at < WIDTH - RIGHT + GAP else []


def _part_keys(parts: Iterable[Part]) -> str:
    at, drawn = float(LEFT), []
    for part in parts:
        square = {"width": 11, "height": 11, "fill_opacity": f"{part.opacity:.2f}"}
        drawn.append(element("rect", x=at, y=-18, fill=part.fill, **square))
        drawn.append(text_at(part.label, at + KEY - 6, -9))
        at += KEY + CHARACTER * len(part.label) + GAP
    return "".join(drawn)


def _file(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    return render("chart.svg.j2", title=title, width=width, height=height, head=HEAD, parts=parts)
