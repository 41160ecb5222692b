"""Lines as SVG, such as throughput over the largest lag: one per method, with its band, and a ring
around a chosen point.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from pipelinerl_common.errors import SettingsError
from pipelinerl_planner.charts import round_up

_WIDTH, _HEIGHT = 640, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 68, 16, 40, 48
_COLORS = ("#2171b5", "#d95f0e", "#31a354", "#756bb1")
_TICKS = 5


Lines = Mapping[str, Sequence[tuple[float, float]]]
"""Points (x, y) by the line's name."""
Bands = Mapping[str, Sequence[tuple[float, float, float]]]
"""(x, low, high) by the name of the line that they are around."""


@dataclass(frozen=True, slots=True)
class Axes:
    """What the chart says around its lines."""

    title: str
    x: str
    y: str


def write_line_chart(
    path: Path,
    axes: Axes,
    lines: Lines,
    mark: tuple[float, float] | None = None,
    bands: Bands | None = None,
) -> None:
    """Both axes begin at 0. Raises SettingsError for a name or place that will not do."""
    if path.suffix not in (".svg", ".html"):
        raise SettingsError(f"--plot {path}: must end in .svg or .html")
    svg = line_chart(axes, lines, mark, bands)
    page = (
        f"<!doctype html><meta charset=utf-8><title>{escape(axes.title)}</title>{svg}\n"
        if path.suffix == ".html"
        else svg
    )
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--plot {path}: cannot be written: {error.strerror}") from error


def line_chart(
    axes: Axes, lines: Lines, mark: tuple[float, float] | None = None, bands: Bands | None = None
) -> str:
    """The SVG document."""
    bands = bands or {}
    points = [point for line in lines.values() for point in line]
    points += [(x, high) for band in bands.values() for x, _, high in band]
    frame = _Frame(
        round_up(max((x for x, _ in points), default=1)),
        round_up(max((y for _, y in points), default=1)),
    )
    drawn = [frame.grid()]
    for index, (name, line) in enumerate(lines.items()):
        color = _COLORS[index % len(_COLORS)]
        drawn.append(frame.band(bands.get(name, ()), color))
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in line)
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        drawn.append(
            f'<text x="{_LEFT + 10}" y="{_TOP + 14 + 16 * index}" '
            f'fill="{color}">{escape(name)}</text>'
        )
    if mark is not None:
        x, y = frame.x(mark[0]), frame.y(mark[1])
        drawn.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="none" stroke="black" '
            'stroke-width="1.5"/>'
        )
    middle_y = (_TOP + _HEIGHT - _BOTTOM) / 2
    drawn.append(
        f'<text x="{_WIDTH / 2}" y="20" text-anchor="middle" '
        f'font-weight="bold">{escape(axes.title)}</text>'
    )
    drawn.append(
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(axes.x)}</text>'
    )
    drawn.append(
        f'<text x="14" y="{middle_y}" text-anchor="middle" transform="rotate(-90 14 '
        f'{middle_y})">{escape(axes.y)}</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 '
        f'{_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" '
        f'fill="white"/>{"".join(drawn)}</svg>'
    )


@dataclass(frozen=True, slots=True)
class _Frame:
    """Maps values to places. Both axes begin at 0."""

    most_x: float
    most_y: float

    def x(self, value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * value / self.most_x

    def y(self, value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - value / self.most_y)

    def band(self, band: Sequence[tuple[float, float, float]], color: str) -> str:
        if not band:
            return ""
        edge = [(x, high) for x, _, high in band] + [
            (x, max(0.0, low)) for x, low, _ in reversed(band)
        ]
        points = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in edge)
        return f'<polygon points="{points}" fill="{color}" fill-opacity="0.2"/>'

    def grid(self) -> str:
        parts = []
        for tick in range(_TICKS + 1):
            x_value, y_value = self.most_x * tick / _TICKS, self.most_y * tick / _TICKS
            x, y = self.x(x_value), self.y(y_value)
            parts.append(
                f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
                'stroke="#ddd"/>'
            )
            parts.append(
                f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{y_value:g}</text>'
            )
            parts.append(
                f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" '
                f'text-anchor="middle">{x_value:g}</text>'
            )
        return "".join(parts)
