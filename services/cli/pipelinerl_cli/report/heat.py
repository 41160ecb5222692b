"""Where the trained tokens' lags lie, step by step, as inline SVG."""

import html
from collections.abc import Sequence

from pipelinerl_cli.report.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Line,
    Scale,
    draw_line,
    drawing,
    thin,
    ticks,
)

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
    scale = Scale(xs[0] - width / 2, xs[-1] + width / 2, -0.5, num_rows - 0.5)
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


def _cell(scale: Scale, x: float, width: float, row: int, share: float) -> str:
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


def _axes(scale: Scale, x: Axis, y: Axis, num_rows: int, last_row: str, all_rows: int) -> list[str]:
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
