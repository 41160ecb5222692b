"""The page around the plots: one HTML file that needs nothing else."""

import html
from collections.abc import Iterable, Sequence
from importlib.resources import files


def document(title: str, body: str) -> str:
    """A whole page with the style and the pointer script inside."""
    here = files("pipelinerl_cli.report")
    style = here.joinpath("style.css").read_text(encoding="utf-8")
    script = here.joinpath("pointer.js").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>\n{style}</style></head>\n"
        f"<body><main>\n{body}\n</main><script>\n{script}</script></body></html>\n"
    )


def tiles(pairs: Iterable[tuple[str, str]]) -> str:
    """Numbers with their names, as (name, number)."""
    cells = (f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>' for name, value in pairs)
    return f'<div class="tiles">{"".join(cells)}</div>'


def section(title: str, *parts: str) -> str:
    return f"<h2>{html.escape(title)}</h2>\n" + "\n".join(parts)


def grid(plots: Sequence[str]) -> str:
    return f'<div class="plots">{"".join(plots)}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f'<div class="wide"><table>{row(head, "th")}{"".join(row(cells, "td") for cells in rows)}</table></div>'


def folded(title: str, text: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary><pre>{html.escape(text)}</pre></details>"
