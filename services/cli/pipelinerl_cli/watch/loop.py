"""Looks again and again, and draws what it sees, until what is watched has ended."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import RenderableType


class Source(Protocol):
    """What can be watched: a run's folder, or a job in a cluster."""

    interval_s: float
    """Seconds between looks where the user does not say."""

    def look(self) -> Sequence[str]:
        """Reads what is there by now; returns a line for each step done and each change since the
        last look.

        Raises SettingsError.
        """

    def headline(self) -> str:
        """How it stands, in one line."""

    def has_ended(self) -> bool:
        """Nothing more will come."""

    def render(self, width: int) -> "RenderableType":
        """The panel, `width` columns wide."""


def watch(source: Source, *, once: bool, interval_s: float) -> int:
    """A live panel on a terminal; otherwise a line at once, one per step or change, and one at the
    end. With `once` the panel.

    Returns the exit status.
    """
    from rich.console import Console
    from rich.live import Live

    console = Console()
    lines = source.look()
    if once or source.has_ended():
        console.print(source.render(console.width))
    elif console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            live.update(source.render(console.width), refresh=True)
            while not source.has_ended():
                time.sleep(interval_s)
                source.look()
                live.update(source.render(console.width), refresh=True)
    else:
        print(source.headline(), flush=True)
        while True:
            for line in lines:
                print(line, flush=True)
            if source.has_ended():
                break
            time.sleep(interval_s)
            lines = source.look()
        print(source.headline(), flush=True)
    return 0
