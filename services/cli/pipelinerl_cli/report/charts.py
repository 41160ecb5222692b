"""Line plots as inline SVG: no script or font from elsewhere, colours from the page's own
variables.

Where the trained tokens' lags lie, step by step, as inline SVG.

What became of the generated tokens: one bar.

A plot as a file of its own: its title and legend are inside the picture, its colours too.
"""

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal, NamedTuple

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 36
MAX_POINTS = 600
NUM_COLOURS = 6
CLOCK_STEPS = (
    1,
    2,
    5,
    10,
    15,
    30,
    60,
    120,
    300,
    600,
    900,
    1800,
    3600,
    7200,
    14400,
    21600,
    43200,
    86400,
)


@dataclass(frozen=True, slots=True)
class Line:
    """A series. `colour` is the number of a page colour, 0 to NUM_COLOURS - 1."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int = 0
    style: Literal["line", "faint", "dashed", "area", "band"] = "line"
    floor: Sequence[float] | None = None
    """Of an "area" or a "band": where it stands on, value by value; None for zero. An area tells
    its height beside the pointer; a band is the range around a line, and tells nothing.
    """


@dataclass(frozen=True, slots=True)
class Axis:
    label: str
    kind: Literal["number", "clock", "duration"] = "number"
    """How a value is written at a tick and beside the pointer."""
    low: float | None = None
    """The axis begins here; None for the data's own range."""
    high: float | None = None

    def form(self, value: float) -> str:
        return FORMS[self.kind](value)


def compact(value: float) -> str:
    """Example: 0.25 is "0.25", 1500 is "1.5k", 2e6 is "2M"."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def clock(seconds: float) -> str:
    """Example: 45 is "45 s", 90 is "1:30", 3700 is "1:01:40"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def duration(seconds: float) -> str:
    """Example: 0.05 is "50 ms", 2.5 is "2.5 s"."""
    return f"{seconds * 1000:.3g} ms" if abs(seconds) < 1 else f"{seconds:.3g} s"


FORMS: dict[str, Callable[[float], str]] = {"number": compact, "clock": clock, "duration": duration}


def plot(title: str, x: Axis, y: Axis, lines: Sequence[Line]) -> str:
    """One figure. Without a finite point in any line it says so instead of drawing."""
    shown = drawable(lines)
    heading = f"<figcaption>{html.escape(title)}{_legend(shown)}</figcaption>"
    if not shown:
        return f'<figure class="plot">{heading}<p class="empty">no data</p></figure>'
    scale, parts = draw(x, y, shown)
    return f'<figure class="plot">{heading}{drawing(title, scale, x, y, parts, shown)}</figure>'


def drawable(lines: Sequence[Line]) -> list[Line]:
    """The lines that have a finite point, with no more points than a picture shows. Bands first: no
    line is below one.
    """
    return sorted(
        (line for line in map(_finite, lines) if line.xs), key=lambda line: line.style != "band"
    )


def draw(x: Axis, y: Axis, lines: Sequence[Line]) -> "tuple[PlotScale, list[str]]":
    """The scale and the parts of the picture of at least one drawable line."""
    x_range = _range(x, [value for line in lines for value in line.xs])
    x_ticks = clock_ticks(*x_range) if x.kind == "clock" else ticks(*x_range)
    y_ticks = ticks(
        *_range(y, [value for line in lines for value in (*line.ys, *(line.floor or ()))])
    )
    scale = PlotScale(x_ticks[0], x_ticks[-1], y_ticks[0], y_ticks[-1])
    if x.low is not None:  # do not leave room on the right for a round number
        scale = PlotScale(scale.x0, max(max(line.xs) for line in lines) or 1.0, scale.y0, scale.y1)
    return scale, [
        draw_grid(scale, x, y, x_ticks, y_ticks),
        *(draw_line(scale, line) for line in lines),
    ]


def drawing(
    title: str, scale: "PlotScale", x: Axis, y: Axis, parts: Sequence[str], lines: Sequence[Line]
) -> str:
    """The picture with its description for those who cannot see it, and what the pointer script
    needs.
    """
    spoken = html.escape(_spoken(title, y, lines))
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" aria-label="{spoken}" '
        "data-plot "
        f'data-x0="{scale.x0:.8g}" data-x1="{scale.x1:.8g}" data-y0="{scale.y0:.8g}" '
        f'data-y1="{scale.y1:.8g}" '
        f'data-x-kind="{x.kind}" data-y-kind="{y.kind}">'
        f"{''.join(parts)}"
        f'<g class="pointer" visibility="hidden"><line y1="{TOP}" '
        f'y2="{HEIGHT - BOTTOM}"/></g></svg>'
        '<div class="tip" hidden></div>'
    )


def _spoken(title: str, y: Axis, lines: Sequence[Line]) -> str:
    """Example: "Reward over time. step: from 0.2 to 0.9, between 0.15 and 0.95." """
    told = [
        f"{line.label or y.label}: from {y.form(line.ys[0])} to {y.form(line.ys[-1])}, "
        f"between {y.form(min(line.ys))} and {y.form(max(line.ys))}."
        for line in named(lines)
    ]
    return " ".join([f"{title}.", *told])


@dataclass(frozen=True, slots=True)
class PlotScale:
    """From values to places in the picture."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / ((self.x1 - self.x0) or 1) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return (
            HEIGHT
            - BOTTOM
            - (value - self.y0) / ((self.y1 - self.y0) or 1) * (HEIGHT - TOP - BOTTOM)
        )


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that cover low to high. Example: ticks(0, 0.83) is [0, 0.2, 0.4, 0.6, 0.8,
    1.0].
    """
    span = high - low
    if span <= 0:
        span = abs(high) or 1.0
        low, high = low - span / 2, high + span / 2
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(k * step, 12) for k in range(first, last + 1)]


def clock_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Like `ticks`, in seconds that are round on a clock. Example: clock_ticks(0, 250) is [0, 60,
    120, 180, 240, 300].
    """
    raw = max(1.0, (high - low) / count)
    step = next(
        (seconds for seconds in CLOCK_STEPS if seconds >= raw * 0.999),
        math.ceil(raw / 86400) * 86400,
    )
    return [
        float(k * step)
        for k in range(math.floor(low / step), math.ceil(max(high, low + step) / step) + 1)
    ]


def thin(
    xs: Sequence[float], ys: Sequence[float], most: int = MAX_POINTS
) -> tuple[list[float], list[float]]:
    """At most about `most` points: of each stretch its lowest and its highest, so that no spike is
    lost.
    """
    if len(xs) <= most:
        return list(xs), list(ys)
    keep: set[int] = {0, len(xs) - 1}
    stretches = most // 2
    for k in range(stretches):
        stretch = range(k * len(xs) // stretches, (k + 1) * len(xs) // stretches)
        keep |= {min(stretch, key=ys.__getitem__), max(stretch, key=ys.__getitem__)}
    order = sorted(keep)
    return [xs[k] for k in order], [ys[k] for k in order]


def smooth(ys: Sequence[float], window: int) -> list[float]:
    """Mean over the last `window` values, fewer at the beginning; of them those that are numbers,
    else not-a-number.
    """
    sums, counts = [0.0], [0]
    for value in ys:
        is_number = math.isfinite(value)
        sums.append(sums[-1] + (value if is_number else 0.0))
        counts.append(counts[-1] + is_number)
    starts = [max(0, k - window) for k in range(1, len(sums))]
    differences = [
        (sums[k] - sums[start], counts[k] - counts[start])
        for k, start in enumerate(starts, start=1)
    ]
    return [total / count if count else math.nan for total, count in differences]


def _finite(line: Line) -> Line:
    if line.floor is not None:
        return line  # areas stand on one another: a value that one leaves out would tear the next
    pairs = [
        (a, b)
        for a, b in zip(line.xs, line.ys, strict=True)
        if math.isfinite(a) and math.isfinite(b)
    ]
    xs, ys = thin([a for a, _ in pairs], [b for _, b in pairs])
    return Line(line.label, xs, ys, line.colour, line.style)


def _range(axis: Axis, values: Sequence[float]) -> tuple[float, float]:
    low = min(values) if axis.low is None else min(axis.low, min(values))
    high = max(values) if axis.high is None else max(axis.high, max(values))
    if high == low == axis.low:  # nothing but the axis' own beginning: it still begins there
        high = low + (abs(low) or 1.0)
    return low, high


def draw_grid(
    scale: PlotScale, x: Axis, y: Axis, x_ticks: Sequence[float], y_ticks: Sequence[float]
) -> str:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for tick in y_ticks:
        at = scale.y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{at + 3.5:.1f}" '
            f'text-anchor="end">{html.escape(y.form(tick))}</text>'
        )
    for tick in x_ticks:
        at = scale.x(tick)
        if LEFT - 1 <= at <= right + 1:
            parts.append(
                f'<line class="tick" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 4}"/>'
            )
            parts.append(
                f'<text x="{at:.1f}" y="{bottom + 16}" '
                f'text-anchor="middle">{html.escape(x.form(tick))}</text>'
            )
    parts.append(
        f'<text class="axis" x="{right}" y="{HEIGHT - 4}" '
        f'text-anchor="end">{html.escape(x.label)}</text>'
    )
    parts.append(f'<line class="base" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    return "".join(parts)


def draw_line(scale: PlotScale, line: Line) -> str:
    points = [f"{scale.x(a):.1f},{scale.y(b):.1f}" for a, b in zip(line.xs, line.ys, strict=True)]
    title = html.escape(line.label)
    if len(points) == 1:
        a, _, b = points[0].partition(",")
        return (
            f'<circle class="dot c{line.colour}" cx="{a}" cy="{b}" r="2.5" data-label="{title}"/>'
        )
    if line.floor is not None:
        floor = [
            f"{scale.x(a):.1f},{scale.y(b):.1f}" for a, b in zip(line.xs, line.floor, strict=True)
        ]
        below = " ".join(reversed(floor))
        polygon = (
            f'<polygon class="{line.style} c{line.colour}" points="{" ".join(points)} {below}"/>'
        )
        if line.style == "band":
            return polygon
        return (
            f'{polygon}<polyline class="edge c{line.colour}" points="{" ".join(points)}" '
            f'data-label="{title}" data-stacked/>'
        )
    return (
        f'<polyline class="{line.style} c{line.colour}" points="{" ".join(points)}" '
        f'data-label="{title}"/>'
    )


def named(lines: Sequence[Line]) -> list[Line]:
    """Those that stand for something by themselves."""
    return [line for line in lines if line.style not in ("faint", "band")]


def _legend(lines: Sequence[Line]) -> str:
    labelled = [line for line in named(lines) if line.label]
    if len(labelled) < 2:
        return ""
    items = (
        f'<span class="key {line.style} c{line.colour}">{html.escape(line.label)}</span>'
        for line in labelled
    )
    return f'<span class="legend">{"".join(items)}</span>'


MOST_COLUMNS = 150
FAINTEST = 0.01
"""A share below this is not drawn."""


def heat(
    title: str,
    x: Axis,
    y: Axis,
    xs: Sequence[float],
    columns: Sequence[Sequence[float]],
    last_row: str,
    mean: Line,
) -> str:
    """Columns of shares that add up to 1, the darker the larger; row k stands for the value k, the
    last for `last_row`.

    `mean` is drawn over it. `xs` holds the column's places, ascending.
    """
    heading = f"<figcaption>{html.escape(title)}</figcaption>"
    if not columns:
        return f'<figure class="plot">{heading}<p class="empty">no data</p></figure>'
    num_rows = 1 + max(
        (k for column in columns for k, share in enumerate(column) if share >= FAINTEST), default=0
    )
    num_rows = max(num_rows, 3)
    width = (xs[-1] - xs[0]) / max(1, len(xs) - 1) or 1.0
    scale = PlotScale(xs[0] - width / 2, xs[-1] + width / 2, -0.5, num_rows - 0.5)
    places, merged = _merged(xs, columns)
    wide = (xs[-1] - xs[0] + width) / len(places)
    cells = [
        _cell(scale, place, wide, row, share)
        for place, column in zip(places, merged, strict=True)
        for row, share in enumerate(column)
    ]
    over = Line(mean.label, *thin(mean.xs, mean.ys), mean.colour)
    parts = [
        *_axes(scale, x, y, num_rows, last_row, len(columns[0])),
        *cells,
        draw_line(scale, over),
    ]
    keys = (
        '<span class="key heat">share of the tokens</span><span class="key line '
        f'c{mean.colour}">mean</span>'
    )
    heading = f'<figcaption>{html.escape(title)}<span class="legend">{keys}</span></figcaption>'
    return f'<figure class="plot">{heading}{drawing(title, scale, x, y, parts, [over])}</figure>'


def _merged(
    xs: Sequence[float], columns: Sequence[Sequence[float]]
) -> tuple[list[float], list[list[float]]]:
    """At most MOST_COLUMNS columns, each the mean of those it stands for."""
    count = min(MOST_COLUMNS, len(columns))
    places, merged = [], []
    for k in range(count):
        part = range(k * len(columns) // count, (k + 1) * len(columns) // count)
        places.append((xs[part[0]] + xs[part[-1]]) / 2)
        merged.append(
            [sum(columns[i][row] for i in part) / len(part) for row in range(len(columns[0]))]
        )
    return places, merged


def _cell(scale: PlotScale, x: float, width: float, row: int, share: float) -> str:
    if share < FAINTEST:
        return ""
    left, right, top, bottom = (
        scale.x(x - width / 2),
        scale.x(x + width / 2),
        scale.y(row + 0.5),
        scale.y(row - 0.5),
    )
    return (
        f'<rect class="cell" x="{left:.1f}" y="{top + 0.5:.1f}" width="{right - left + 0.3:.1f}" '
        f'height="{bottom - top - 1:.1f}" fill-opacity="{share**0.6:.2f}"/>'
    )


def _axes(
    scale: PlotScale, x: Axis, y: Axis, num_rows: int, last_row: str, all_rows: int
) -> list[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    every = max(1, num_rows // 6)
    parts = []
    for row in range(0, num_rows, every):
        label = last_row if row == all_rows - 1 else y.form(row)
        parts.append(
            f'<text x="{LEFT - 6}" y="{scale.y(row) + 3.5:.1f}" '
            f'text-anchor="end">{html.escape(label)}</text>'
        )
    for tick in ticks(scale.x0, scale.x1):
        if LEFT - 1 <= (at := scale.x(tick)) <= right + 1:
            parts.append(
                f'<line class="tick" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 4}"/>'
            )
            parts.append(
                f'<text x="{at:.1f}" y="{bottom + 16}" '
                f'text-anchor="middle">{html.escape(x.form(tick))}</text>'
            )
    parts.append(
        f'<text class="axis" x="{right}" y="{HEIGHT - 4}" '
        f'text-anchor="end">{html.escape(x.label)}</text>'
    )
    parts.append(f'<line class="base" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(f'<line class="base" x1="{LEFT}" x2="{LEFT}" y1="{TOP}" y2="{bottom}"/>')
    return parts


class Part(NamedTuple):
    label: str
    num_tokens: float
    colour: int
    """Number of a page colour, 0 to 5."""


def flow(title: str, parts: Sequence[Part]) -> str:
    """A bar whose pieces are as long as their counts, and their numbers under it."""
    shown = [part for part in parts if part.num_tokens > 0]
    total = sum(part.num_tokens for part in shown)
    heading = f"<figcaption>{html.escape(title)}</figcaption>"
    if not total:
        return f'<figure class="plot flow">{heading}<p class="empty">no data</p></figure>'
    pieces = "".join(
        f'<i class="fill c{part.colour}" style="flex-grow:{part.num_tokens / total:.6f}"></i>'
        for part in shown
    )
    rows = "".join(
        f'<li><i class="fill c{part.colour}"></i>{html.escape(part.label)} '
        f"<b>{compact(part.num_tokens)}</b> "
        f"<span>{part.num_tokens / total:.1%}</span></li>"
        for part in shown
    )
    return (
        f'<figure class="plot flow">{heading}<div class="bar" '
        f'aria-hidden="true">{pieces}</div><ul>{rows}</ul></figure>'
    )


HEAD = 52
"""Room above the plot for the title and one row of keys."""
KEY, CHARACTER, GAP = 22, 6.4, 18
"""Widths of a key's stroke, of a character, and of the space between two keys."""


def standalone(title: str, x: Axis, y: Axis, lines: Sequence[Line]) -> str:
    """The text of an SVG file. Lines without a finite point are left out; without any it says so."""
    shown = drawable(lines)
    parts = (
        draw(x, y, shown)[1]
        if shown
        else [f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">no data</text>']
    )
    style = files("pipelinerl_cli.report").joinpath("chart.css").read_text(encoding="utf-8")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {-HEAD} {WIDTH} {HEIGHT + HEAD}" '
        f'width="{WIDTH}" height="{HEIGHT + HEAD}" role="img" font-family="system-ui, sans-serif">'
        f"<title>{html.escape(title)}</title><style>\n{style}</style>"
        f'<rect y="{-HEAD}" width="{WIDTH}" height="{HEIGHT + HEAD}" rx="8" fill="var(--card)"/>'
        f'<text class="title" x="{LEFT}" '
        f'y="{24 - HEAD}">{html.escape(title)}</text>{_keys(shown)}{"".join(parts)}</svg>\n'
    )


def _keys(lines: Sequence[Line]) -> str:
    labelled = [line for line in named(lines) if line.label]
    at, parts = float(LEFT), []
    for line in labelled:
        parts.append(
            f'<polyline class="{line.style} c{line.colour}" points="{at:.0f},-13 '
            f'{at + KEY - 6:.0f},-13"/>'
        )
        parts.append(f'<text x="{at + KEY:.0f}" y="-9">{html.escape(line.label)}</text>')
        at += KEY + CHARACTER * len(line.label) + GAP
    return "".join(parts) if at < WIDTH - RIGHT + GAP else ""
