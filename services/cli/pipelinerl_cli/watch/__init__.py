"""`pipelinerl watch DIR|JOB`: live numbers of a run's folder, or of a job in the cluster."""

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from pipelinerl_common.errors import SettingsError

if TYPE_CHECKING:
    from rich.console import RenderableType


class Source(Protocol):
    """What can be watched: a run's folder, or a job in a cluster."""

    interval_s: float
    """Seconds between looks, unless the user chooses others."""

    def look(self) -> Sequence[str]:
        """Reads the present state; returns a line for each step done and each change since the last
        look.

        Raises SettingsError.
        """

    def headline(self) -> str:
        """The present state in one line."""

    def has_ended(self) -> bool:
        """No more numbers will come."""

    def render(self, width: int) -> "RenderableType":
        """The panel, `width` columns wide."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="DIR|JOB",
        help="a run's folder, or the name of a PipelineRLJob in the cluster",
    )
    parser.add_argument(
        "--once", action="store_true", help="print the present numbers once and end"
    )
    parser.add_argument(
        "--interval",
        type=float,
        metavar="S",
        help="seconds between looks; default 0.5, in a cluster 5",
    )
    parser.add_argument(
        "-n",
        "--namespace",
        metavar="NAME",
        help="the job's namespace; default that of kubectl's context",
    )
    parser.add_argument(
        "--context",
        metavar="NAME",
        help="context of kubectl's configuration; default its current one",
    )


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from pipelinerl_cli.watch.cluster import ClusterJob
    from pipelinerl_cli.watch.run_folder import RunFolderSource
    from pipelinerl_common.text import did_you_mean_folder

    if args.interval is not None and not 0.05 <= args.interval <= 3600:
        raise SettingsError(f"--interval {args.interval:g}: give 0.05 to 3600 seconds")
    folder = Path(args.target)
    source: Source
    if folder.is_dir():
        source = RunFolderSource.open(folder)
    elif "/" in args.target:
        raise SettingsError(
            f"{args.target}: no such folder; give the --output folder of a `pipelinerl "
            f"up`{did_you_mean_folder(folder)}"
        )
    else:
        source = ClusterJob.named(args.target, namespace=args.namespace, context=args.context)
    watch(source, once=args.once, interval_s=args.interval or source.interval_s)
    return 0


def watch(source: Source, *, once: bool, interval_s: float) -> None:
    """Looks until the run or job has ended. On a terminal it draws a live panel; otherwise it
    prints a line at once, one per step or change, and one at the end. With `once` it prints the
    panel.
    """
    from rich.console import Console
    from rich.live import Live

    console = Console()
    lines = source.look()
    if once or source.has_ended():
        console.print(source.render(console.width))
        return
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            live.update(source.render(console.width), refresh=True)
            while not source.has_ended():
                time.sleep(interval_s)
                source.look()
                live.update(source.render(console.width), refresh=True)
        return
    print(source.headline(), flush=True)
    while True:
        for line in lines:
            print(line, flush=True)
        if source.has_ended():
            break
        time.sleep(interval_s)
        lines = source.look()
    print(source.headline(), flush=True)
