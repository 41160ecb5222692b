"""Types of command-line arguments that several subcommands take.

A table on the terminal: columns as wide as their widest cell, never cut.
"""

import argparse
from collections.abc import Sequence


def at_least_one(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[k]) for line in lines) for k in range(len(head))]
    for line in lines:
        first, *rest = (
            cell.ljust(width) if k == 0 else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join([first, *rest]))
