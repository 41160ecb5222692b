"""What several subcommands share on a terminal: checks of arguments, tables, a line of progress."""

import argparse
import io
import sys
from collections.abc import Sequence

from pipelinerl_common.errors import SettingsError

WIDE = 10_000
"""Columns: a table is as wide as its cells, never cut."""


def at_least_one(text: str) -> int:
    """A whole number from 1 on, as an argument's type."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def at_least(least: int, flag: str, value: int) -> int:
    """`value`. Raises SettingsError when it is less."""
    if value < least:
        raise SettingsError(f"{flag} {value} must be at least {least}")
    return value


def positive(flag: str, value: float) -> float:
    """`value`. Raises SettingsError when it is not above 0, or infinite."""
    if not 0 < value < float("inf"):
        raise SettingsError(f"{flag} {value:g} must be a number above 0")
    return value


def print_table(head: Sequence[str] | None, rows: Sequence[Sequence[str]]) -> None:
    """The first column is aligned left, the others right. Without `head` there is none."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.show_header = head is not None
    for k, name in enumerate(head or rows[0]):
        table.add_column(Text(name), justify="left" if k == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    # Printed as text: a reader that is gone must end the command quietly, as for other output.
    lines = io.StringIO()
    Console(file=lines, width=WIDE, force_terminal=sys.stdout.isatty()).print(table)
    print(lines.getvalue(), end="")


class ProgressLine:
    """A line on stderr, rewritten in place on a terminal and left out elsewhere."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._shows = sys.stderr.isatty() and not quiet

    def show(self, text: str) -> None:
        if self._shows:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        self.show("")
