"""The result of a bench, printed as a table or as one JSON object."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, Union

from rich.console import Console
from rich.table import Table

Value: TypeAlias = Union[float, int, str, "Mapping[str, Value]"]
MARKS = {True: " [green]met[/]", False: " [red]missed[/]", None: ""}


@dataclass(frozen=True)
class Row:
    """One line of the table: `target` is what the measurement should reach, for example ">= 3", and
    `met` whether it did.
    """

    what: str
    measured: str
    baseline: str = ""
    target: str = ""
    met: bool | None = None


@dataclass(frozen=True)
class Report:
    """The result of one bench. `values` is the JSON object; a skipped bench has only `skipped`: the
    reason and the remedy.
    """

    title: str
    values: dict[str, Value] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    skipped: str | None = None


def at_least(what: str, value: float, bound: float, baseline: str = "") -> Row:
    """A row whose value should be `bound` or more."""
    return Row(what, f"{value:.3g}", baseline, f">= {bound:g}", value >= bound)


def at_most(what: str, value: float, bound: float, baseline: str = "") -> Row:
    """A row whose value should be `bound` or less."""
    return Row(what, f"{value:.3g}", baseline, f"<= {bound:g}", value <= bound)


def show(report: Report, *, as_json: bool) -> None:
    """Prints the report on standard output; as JSON it is the only thing there."""
    if as_json:
        values = {"skipped": report.skipped} if report.skipped is not None else report.values
        print(json.dumps(values, allow_nan=False))
    elif report.skipped is not None:
        print(f"{report.title}: skipped. {report.skipped}")
    else:
        table = Table("", "measured", "baseline", "target", title=report.title)
        for row in report.rows:
            table.add_row(row.what, row.measured, row.baseline, row.target + MARKS[row.met])
        Console().print(table)


def progress(text: str) -> None:
    """Prints one line on standard error about what the bench does now."""
    print(text, file=sys.stderr, flush=True)
