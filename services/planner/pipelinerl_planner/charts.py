"""The article's bar charts as SVG: effective throughput by staleness layer, waste hatched on top."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from pathlib import Path

_WIDTH, _HEIGHT = 300, 230
_LEFT, _TOP, _BOTTOM = 48, 34, 40
_COLUMNS = 4
_SHADES = ("#c6dbef", "#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#08519c", "#08306b", "#041e42")
_HATCHES = {
    "L2": ("waste L2 (cancelled)", 45, "#d95f0e"),
    "L3": ("waste L3 (dropped)", -45, "#7f7f7f"),
}


@dataclass(frozen=True, slots=True)
class Bar:
    """One run. Example: Bar("2", {0: 400.0, 1: 900.0}, 120.0, 60.0, "max 1"): tokens per second by
    staleness, then waste.
    """

    label: str
    by_staleness: Mapping[int, float]
    waste_l2: float
    waste_l3: float
    note: str

    @property
    def total(self) -> float:
        return sum(self.by_staleness.values()) + self.waste_l2 + self.waste_l3


def write_chart(path: Path, panels: Mapping[str, Sequence[Bar]]) -> None:
    """One panel per policy, all with the same scale. The name must end in .svg or .html."""
    if path.suffix not in (".svg", ".html"):
        raise ValueError(f"plot file {path} must end in .svg or .html")
    svg = chart(panels)
    page = (
        f"<!doctype html><meta charset=utf-8><title>Staleness policies</title>{svg}\n"
        if path.suffix == ".html"
        else svg
    )
    path.write_text(page, encoding="utf-8")


def chart(panels: Mapping[str, Sequence[Bar]]) -> str:
    """The SVG document."""
    top = round_up(max((bar.total for bars in panels.values() for bar in bars), default=1.0))
    columns = min(_COLUMNS, max(1, len(panels)))
    rows = ceil(len(panels) / columns)
    width, height = max(columns * _WIDTH, 560), rows * _HEIGHT + 50
    drawn = [
        "<g "
        f'transform="translate({index % columns * _WIDTH},{index // columns * _HEIGHT})">{_panel(name, bars, top)}</g>'
        for index, (name, bars) in enumerate(panels.items())
    ]
    oldest = max(
        (age for bars in panels.values() for bar in bars for age in bar.by_staleness), default=0
    )
    legend = f'<g transform="translate(12,{rows * _HEIGHT + 18})">{_legend(oldest)}</g>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 '
        f'{width} {height}" '
        f'font-family="sans-serif" font-size="11">{_definitions()}<rect width="100%" height="100%" '
        'fill="white"/>'
        f"{''.join(drawn)}{legend}</svg>"
    )


def _panel(name: str, bars: Sequence[Bar], top: float) -> str:
    plot_height = _HEIGHT - _TOP - _BOTTOM
    plot_width = _WIDTH - _LEFT - 10
    parts = [
        f'<text x="{_WIDTH / 2}" y="18" text-anchor="middle" '
        f'font-weight="bold">{escape(name)}</text>'
    ]
    for tick in range(5):
        y = _TOP + plot_height * (1 - tick / 4)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_LEFT + plot_width}" y1="{y:.1f}" y2="{y:.1f}" '
            'stroke="#ddd"/>'
        )
        parts.append(
            f'<text x="{_LEFT - 4}" y="{y + 4:.1f}" text-anchor="end">{top * tick / 4:.0f}</text>'
        )
    slot = plot_width / max(1, len(bars))
    for index, bar in enumerate(bars):
        x = _LEFT + index * slot + slot * 0.15
        parts.append(_stack(bar, x, slot * 0.7, plot_height, top))
    return "".join(parts)


def _stack(bar: Bar, x: float, width: float, plot_height: float, top: float) -> str:
    layers = [
        (_shade(age), f"staleness {age}", value) for age, value in sorted(bar.by_staleness.items())
    ]
    layers += [
        (f"url(#{name})", _HATCHES[name][0], value)
        for name, value in (("L2", bar.waste_l2), ("L3", bar.waste_l3))
    ]
    y = _TOP + plot_height
    parts = []
    for fill, what, value in layers:
        height = value / top * plot_height
        if height <= 0:
            continue
        y -= height
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{fill}" stroke="white" '
            f'stroke-width="0.4"><title>{what}: {value:.0f} tokens/s</title></rect>'
        )
    middle = x + width / 2
    parts.append(
        f'<text x="{middle:.1f}" y="{y - 3:.1f}" text-anchor="middle" '
        f'font-size="9">{escape(bar.note)}</text>'
    )
    base = _TOP + plot_height + 14
    parts.append(
        f'<text x="{middle:.1f}" y="{base}" text-anchor="middle">{escape(bar.label)}</text>'
    )
    return "".join(parts)


def _legend(oldest: int) -> str:
    entries = [
        (_shade(age), f"staleness {age}" + ("+" if age == len(_SHADES) - 1 else ""))
        for age in _ages(oldest)
    ]
    entries += [(f"url(#{name})", what) for name, (what, _, _) in _HATCHES.items()]
    parts = ['<text y="0">tokens per second:</text>']
    x = 110
    for fill, what in entries:
        parts.append(
            f'<rect x="{x}" y="-10" width="12" height="12" fill="{fill}" stroke="#888" '
            'stroke-width="0.5"/>'
        )
        parts.append(f'<text x="{x + 16}" y="0">{what}</text>')
        x += 28 + 6 * len(what)
    return "".join(parts)


def _ages(oldest: int) -> range:
    return range(min(oldest, len(_SHADES) - 1) + 1)


def _shade(age: int) -> str:
    return _SHADES[min(age, len(_SHADES) - 1)]


def _definitions() -> str:
    patterns = [
        f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate({angle})">'
        '<rect width="6" height="6" fill="white"/>'
        f'<line x1="0" y1="0" x2="0" y2="6" stroke="{color}" stroke-width="2.5"/></pattern>'
        for name, (_, angle, color) in _HATCHES.items()
    ]
    return f"<defs>{''.join(patterns)}</defs>"


def round_up(value: float) -> float:
    """The next number of the form 1, 2, 2.5, 4, 5 or 8 times a power of ten; 1 for nothing."""
    power = 10.0 ** floor(log10(value)) if value > 0 else 1.0
    return next(
        (power * factor for factor in (1, 2, 2.5, 4, 5, 8, 10) if power * factor >= value), value
    )
