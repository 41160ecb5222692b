"""A table on the terminal: columns as wide as their widest cell, never cut."""

from collections.abc import Sequence


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Runs are columns and numbers are lines, so that any number of numbers fits on any terminal."""
    lines = [[name, *(row[k] for row in rows)] for k, name in enumerate(head)]
    widths = [max(len(line[k]) for line in lines) for k in range(len(rows) + 1)]
    for line in lines:
        first, *rest = (
            cell.ljust(width) if k == 0 else cell.rjust(width) for k, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join([first, *rest]))
