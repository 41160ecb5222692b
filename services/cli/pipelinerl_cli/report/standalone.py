"""A plot as a file of its own: its title and legend are inside the picture, its colours too."""

import html
from collections.abc import Sequence
from importlib.resources import files

from pipelinerl_cli.report.svg import HEIGHT, LEFT, RIGHT, WIDTH, Axis, Line, draw, drawable, named

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
