"""Progress for people: a live panel on a terminal, one line per step otherwise. `pipelinerl watch`
draws the same panel of any run's folder. rich draws it; textual, a framework for whole applications
with keys and scrolling, was looked at and is too much for ten numbers.
"""

import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, TextIO

from pipelinerl_cli.up.live_metrics import RunView

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

SPARKS = "▁▂▃▄▅▆▇█"
TEXT_COLUMNS = 52
"""Columns of the widest row beside its sparkline: border, label and numbers."""
LEAST_SPARKS = 8
CTRL_C_COLUMNS = 4
"""Left free at the right edge: the terminal writes "^C" there, and a line that wraps would shift
the panel by one.
"""


class Display(Protocol):
    """Where the progress of a run is shown."""

    def note(self, text: str) -> None:
        """Shows an event; it stays on the screen."""

    def update(self, view: RunView) -> None:
        """The view has changed, or time has passed."""

    def stepped(self, view: RunView) -> None:
        """A step is done."""


class PlainDisplay:
    """One line per step and per change of phase, for logs."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._shown = ""

    def note(self, text: str) -> None:
        try:
            print(text, file=self._out, flush=True)
        except OSError:
            # The reader is gone: the run continues without it, and what is buffered must not fail
            # again at exit.
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._out.fileno())

    def update(self, view: RunView) -> None:
        if view.phase != self._shown and not view.is_training:
            self._shown = view.phase
            self.note(view.phase)

    def stepped(self, view: RunView) -> None:
        self.note(step_line(view))


class LiveDisplay(AbstractContextManager["LiveDisplay"]):
    """A panel that is redrawn in place."""

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
        return render(
            view,
            name=self._job,
            place=self._output,
            state=f"{duration(time.monotonic() - self._began)}, Ctrl-C stops",
            width=max(1, self._live.console.width - CTRL_C_COLUMNS),
        )


def step_line(view: RunView) -> str:
    """The newest step in one line, for logs. Values called mean are over the run, as in its
    summary.
    """
    values = view.step_values
    return (
        f"step {view.step}/{view.steps_total}"
        f"  reward {number(values.get('reward_mean'), 3)}"
        f"  lag {number(values.get('lag_mean'))} (max {number(values.get('lag_max'), 0)})"
        f"  ESS {number(values.get('ess'), 3)}"
        f"  {number(view.generation.tokens_per_second, 0)} tokens/s mean"
        f"  ready {_groups(view, 'ready')}"
        f"  running {_groups(view, 'running')}"
        f"  updates {number(view.total('trainer', 'weight_updates_total'), 0)}"
        + (f"  actors {view.actors}" if view.is_elastic else "")
        + (f"  restarts {view.restarts}" if view.restarts else "")
    )


def rows(view: RunView, sparks: int) -> Sequence[tuple[str, str, str]]:
    """Label, numbers, and their trend over the last steps in at most `sparks` characters.

    Numbers are of the newest step, but tokens per second and pause are means over the run, as in
    its summary.
    """
    values, pause = view.step_values, view.pause.mean

    def trend(
        name: str, role: str = "trainer", low: float | None = 0.0, high: float | None = None
    ) -> str:
        return sparkline(view.trend(role, name), sparks, low=low, high=high)

    lag = f"{number(values.get('lag_mean'))} mean, {number(values.get('lag_max'), 0)} max"
    speed = f"{number(view.generation.tokens_per_second, 0)} mean"
    groups = f"{_groups(view, 'ready')} ready, {_groups(view, 'running')} running"
    updates = number(view.total("trainer", "weight_updates_total"), 0)
    if math.isfinite(pause):
        updates += f", pause {pause:.3f} s mean"
    return [
        ("reward", number(values.get("reward_mean"), 3), trend("reward_mean", low=None)),
        ("lag", lag, trend("lag_mean")),
        ("ESS", number(values.get("ess"), 3), trend("ess", low=0.8, high=1.0)),
        ("tokens/s", speed, trend("generation_tokens_per_second", "actor")),
        ("groups", groups, trend("queue_groups{stage=ready}", "preprocessor")),
        ("updates", updates, trend("pause_seconds")),
        *([("actors", f"{view.actors} ready", "")] if view.is_elastic else []),
        *_evaluations(view, sparks),
        ("restarts", str(view.restarts), ""),
    ]


def _groups(view: RunView, stage: str) -> str:
    return number(view.gauge("preprocessor", f"queue_groups{{stage={stage}}}"), 0)


def _evaluations(view: RunView, sparks: int) -> Iterable[tuple[str, str, str]]:
    """A row for each set, with the first of its pass@k."""
    for each in view.evaluations[-1] if view.evaluations else ():
        k, newest = next(iter(each.pass_at.items()))
        results = (one for found in view.evaluations for one in found if one.name == each.name)
        means = [one.pass_at[k].mean for one in results if k in one.pass_at]
        numbers = f"pass@{k} {newest.mean:.3f} at step {each.step}"
        yield each.name, numbers, sparkline(means, sparks, low=0.0, high=1.0)


def render(view: RunView, *, name: str, place: str, state: str, width: int) -> "RenderableType":
    """The whole panel; before the first step it shows what the run is waiting for."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    if not view.is_training:
        detail = f"  {view.detail}" if view.detail else ""
        parts.append(Text.assemble((view.phase, "bold"), (detail, "dim")))
    else:
        sparks = max(LEAST_SPARKS, width - TEXT_COLUMNS)
        numbers = [
            (label, Text(text, style="red" if label == "restarts" and view.restarts else ""), trend)
            for label, text, trend in rows(view, sparks)
        ]
        parts += [_progress_bar(view), labelled(numbers)]
        if view.detail:
            phase = "" if view.phase == "training" else f"{view.phase}: "
            parts.append(Text(f"{phase}{view.detail}", style="yellow"))
    return framed(Group(*parts), name=name, place=place, state=state, width=width)


def _progress_bar(view: RunView) -> "RenderableType":
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

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
    return bar


def labelled(rows: Iterable[tuple[str, "RenderableType", str]]) -> "RenderableType":
    """Rows of a panel: a label, a text, and a sparkline that may be empty."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for label, text, trend in rows:
        table.add_row(Text(label, style="dim"), text, Text(trend, style="cyan"))
    return table


def framed(
    body: "RenderableType", *, name: str, place: str, state: str, width: int
) -> "RenderableType":
    """`body` in a frame with the job's name, its place, and its state."""
    from rich.panel import Panel
    from rich.text import Text

    title = Text.assemble((name, "bold"), "  ", (place, "dim"))
    return Panel(
        body, title=title, subtitle=Text(state, style="dim"), title_align="left", width=width
    )


def sparkline(
    values: Iterable[float],
    width: int | None = None,
    *,
    low: float | None = None,
    high: float | None = None,
) -> str:
    """The last `width` values. `low` and `high` widen the scale, so that noise is not drawn as
    large as a change.

    Example: [0, 0.5, 1] is "▁▅█"; a constant series is drawn at the bottom of its scale.
    """
    finite = [value for value in values if math.isfinite(value)]
    finite = finite[-width:] if width is not None else finite
    if not finite:
        return ""
    bottom = min(finite) if low is None else min(low, *finite)
    span = (max(finite) if high is None else max(high, *finite)) - bottom
    shares = ((value - bottom) / span if span > 0 else 0.0 for value in finite)
    return "".join(SPARKS[round(share * (len(SPARKS) - 1))] for share in shares)


def duration(seconds: float) -> str:
    """Example: 75 is "1:15", 3675 is "1:01:15"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def number(value: float | None, digits: int = 2) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if digits == 0 else f"{value:.{digits}f}"
