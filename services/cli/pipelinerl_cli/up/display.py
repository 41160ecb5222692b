"""Progress for people: a live panel on a terminal, one line per step otherwise."""

import os
import sys
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, TextIO

from pipelinerl_cli.up.panel import duration, number, render
from pipelinerl_cli.up.view import RunView

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

CTRL_C_COLUMNS = 4
"""Left free at the right edge: the terminal writes "^C" there, and a line that wraps would shift
the panel by one.
"""


class Display(Protocol):
    def note(self, text: str) -> None:
        """Something that happened, kept on the screen."""

    def update(self, view: RunView) -> None:
        """The view has changed, or time has passed."""

    def stepped(self, view: RunView) -> None:
        """A step is done."""


def step_line(view: RunView) -> str:
    """The newest step in one line, for logs. What is called a mean is one over the run, as in its
    summary.
    """
    values = view.step_values
    return (
        f"step {view.step}/{view.steps_total}"
        f"  reward {number(values.get('reward_mean'), 3)}"
        f"  lag {number(values.get('lag_mean'))} (max {number(values.get('lag_max'), 0)})"
        f"  ESS {number(values.get('ess'), 3)}"
        f"  {number(view.generation.tokens_per_second, 0)} tokens/s mean"
        f"  ready {number(view.gauge('preprocessor', 'queue_groups{stage=ready}'), 0)}"
        f"  running {number(view.gauge('preprocessor', 'queue_groups{stage=running}'), 0)}"
        f"  updates {number(view.total('trainer', 'weight_updates_total'), 0)}"
        + (f"  actors {view.actors}" if view.is_elastic else "")
        + (f"  restarts {view.restarts}" if view.restarts else "")
    )


class PlainDisplay:
    """One line per step and per change of phase, for logs. When its reader is gone the run goes on
    without it.
    """

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
        self.note(step_line(view))


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
        return render(
            view,
            name=self._job,
            place=self._output,
            state=f"{duration(time.monotonic() - self._began)}, Ctrl-C stops",
            width=max(1, self._live.console.width - CTRL_C_COLUMNS),
        )
