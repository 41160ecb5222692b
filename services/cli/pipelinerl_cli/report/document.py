"""The page around the plots: one HTML file that needs nothing else."""

import html
from collections.abc import Iterable, Sequence
from importlib.resources import files


def document(title: str, body: str) -> str:
    """A whole page with the style and the pointer script inside."""
    here = files("pipelinerl_cli.report")
    style = "".join(
        here.joinpath(name).read_text(encoding="utf-8") for name in ("chart.css", "style.css")
    )
    script = here.joinpath("pointer.js").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>\n{style}</style></head>\n"
        f"<body><main>\n{body}\n</main><script>\n{script}</script></body></html>\n"
    )


def tiles(pairs: Iterable[tuple[str, str]], *, small: bool = False) -> str:
    """Numbers with their names, as (name, number)."""
    cells = (
        f"<div><dd>{html.escape(value)}</dd><dt>{html.escape(name)}</dt></div>"
        for name, value in pairs
    )
    return f'<dl class="tiles{" small" if small else ""}">{"".join(cells)}</dl>'


def hero(figure: str, beside: str) -> str:
    """The figure that matters most, large, with numbers beside it."""
    return f'<div class="hero">{figure}{beside}</div>'


def section(title: str, explanation: str, *parts: str) -> str:
    said = f'<p class="sub">{html.escape(explanation)}</p>' if explanation else ""
    return f"<section><h2>{html.escape(title)}</h2>{said}\n" + "\n".join(parts) + "</section>"


def grid(plots: Sequence[str]) -> str:
    return f'<div class="plots">{"".join(plots)}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return (
        '<div class="wide" '
        f'tabindex="0"><table>{row(head, "th")}{"".join(row(cells, "td") for cells in rows)}</table></div>'
    )


def folded(title: str, body: str) -> str:
    """`body` is markup."""
    return f"<details><summary>{html.escape(title)}</summary>{body}</details>"
