"""Progress for people: a live panel on a terminal, one line per step otherwise."""

import math
import os
import sys
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, TextIO

from pipelinerl_cli.up.view import RunView

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

SPARKS = "▁▂▃▄▅▆▇█"
CTRL_C_COLUMNS = 4
"""Left free at the right edge: the terminal writes "^C" there, and a line that wraps would shift the panel by one."""


class Display(Protocol):
    def note(self, text: str) -> None:
        """Something that happened, kept on the screen."""

    def update(self, view: RunView) -> None:
        """The view has changed, or time has passed."""

    def stepped(self, view: RunView) -> None:
        """A step is done."""


def sparkline(values: Iterable[float]) -> str:
    """Example: [0, 0.5, 1] is "▁▅█"; a constant series is drawn at the bottom."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    return "".join(SPARKS[round((value - low) / span * (len(SPARKS) - 1)) if span > 0 else 0] for value in finite)


def duration(seconds: float) -> str:
    """Example: 75 is "1:15", 3675 is "1:01:15"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def number(value: float | None, digits: int = 2) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if digits == 0 else f"{value:.{digits}f}"


class PlainDisplay:
    """One line per step and per change of phase, for logs. When its reader is gone the run goes on without it."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._shown = ""

    def note(self, text: str) -> None:
        try:
            print(text, file=self._out, flush=True)
        except OSError:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._out.fileno())

    def update(self, view: RunView) -> None:
        if view.phase != self._shown and not view.is_training:
            self._shown = view.phase
            self.note(view.phase)

    def stepped(self, view: RunView) -> None:
        values = view.step_values
        self.note(
            f"step {view.step}/{view.steps_total}"
            f"  reward {number(values.get('reward_mean'), 3)}"
            f"  lag {number(values.get('lag_mean'))} (max {number(values.get('lag_max'), 0)})"
            f"  ESS {number(values.get('ess'), 3)}"
            f"  {number(view.gauge('actor', 'generation_tokens_per_second'), 0)} tokens/s"
            f"  ready {number(view.gauge('preprocessor', 'groups_ready'), 0)}"
            f"  running {number(view.gauge('preprocessor', 'groups_running'), 0)}"
            f"  updates {number(view.total('trainer', 'weight_updates_total'), 0)}"
            + (f"  restarts {view.restarts}" if view.restarts else "")
        )


class LiveDisplay(AbstractContextManager["LiveDisplay"]):
    """A panel that is drawn again in place."""

    def __init__(self, job: str, output: str, console: "Console | None" = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._job, self._output = job, output
        self._began = time.monotonic()
        self._live = Live(console=console or Console(), auto_refresh=False, transient=False)

    def __enter__(self) -> "LiveDisplay":
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def note(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def update(self, view: RunView) -> None:
        self._live.update(self.render(view), refresh=True)

    def stepped(self, view: RunView) -> None:
        self.update(view)

    def render(self, view: RunView) -> "RenderableType":
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        elapsed = duration(time.monotonic() - self._began)
        parts: list[RenderableType] = []
        if not view.is_training:
            head = Text.assemble((view.phase, "bold"), (f"  {view.detail}" if view.detail else "", "dim"))
            parts.append(head)
        else:
            left = view.seconds_left
            bar = Table.grid(padding=(0, 1), expand=True)
            bar.add_column()
            bar.add_column(ratio=1)
            bar.add_column(justify="right")
            bar.add_row(
                Text(f"step {view.step}/{view.steps_total}", style="bold"),
                ProgressBar(total=max(1, view.steps_total), completed=view.step),
                Text(f"{duration(left)} left" if left is not None else ""),
            )
            parts += [bar, self._numbers(view)]
            if view.detail:
                parts.append(Text(view.detail if view.phase == "training" else f"{view.phase}: {view.detail}", style="yellow"))
        title = f"[bold]{self._job}[/bold]  [dim]{self._output}[/dim]"
        subtitle = f"[dim]{elapsed}, Ctrl-C stops[/dim]"
        width = max(1, self._live.console.width - CTRL_C_COLUMNS)
        return Panel(Group(*parts), title=title, subtitle=subtitle, title_align="left", width=width)

    def _numbers(self, view: RunView) -> "Table":
        from rich.table import Table
        from rich.text import Text

        values = view.step_values
        pause = values.get("pause_seconds")
        cells = [
            ("reward", f"{number(values.get('reward_mean'), 3)} {sparkline(view.rewards)}"),
            ("lag", f"{number(values.get('lag_mean'))} mean, {number(values.get('lag_max'), 0)} max"),
            ("ESS", number(values.get("ess"), 3)),
            ("tokens/s", number(view.gauge("actor", "generation_tokens_per_second"), 0)),
            (
                "groups",
                f"{number(view.gauge('preprocessor', 'groups_ready'), 0)} ready, "
                f"{number(view.gauge('preprocessor', 'groups_running'), 0)} running",
            ),
            (
                "updates",
                f"{number(view.total('trainer', 'weight_updates_total'), 0)}"
                + (f", pause {pause * 1000:.0f} ms" if pause is not None and math.isfinite(pause) else ""),
            ),
            ("restarts", str(view.restarts)),
        ]
        table = Table.grid(padding=(0, 2))
        for label, cell in cells:
            table.add_row(Text(label, style="dim"), Text(cell, style="red" if label == "restarts" and view.restarts else ""))
        return table
