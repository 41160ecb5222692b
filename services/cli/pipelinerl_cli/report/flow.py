"""What became of the generated tokens: one bar."""

import html
from collections.abc import Sequence
from typing import NamedTuple

from pipelinerl_cli.report.svg import compact


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
