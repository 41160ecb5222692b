"""Looks again and again, and draws what it sees, until what is watched has ended.

`pipelinerl watch DIR|JOB`: live numbers of a run's folder, or of a job in the cluster.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import RenderableType
import argparse

from pipelinerl_common.errors import SettingsError


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="DIR|JOB",
        help="a run's folder, or the name of a PipelineRLJob in the cluster",
    )
    parser.add_argument("--once", action="store_true", help="print the numbers as they are, once")
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
    return watch(source, once=args.once, interval_s=args.interval or source.interval_s)
