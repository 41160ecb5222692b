"""`pipelinerl compare A B [...]`: prints a table and writes a page with the learning curves."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="DIR", help="folders of two or more runs")
    parser.add_argument("--output", type=Path, default=Path("compare.html"), metavar="FILE", help="default compare.html")
    parser.add_argument(
        "--reward",
        type=float,
        action="append",
        metavar="R",
        help="reward whose reaching is timed; repeatable; default 0.5, 0.8",
    )


def run(args: argparse.Namespace) -> int:
    from pipelinerl_cli.compare.page import compare_page, transposed
    from pipelinerl_cli.compare.table import COLUMNS, Compared, load, rows
    from pipelinerl_cli.compare.terminal import print_table
    from pipelinerl_common.errors import SettingsError

    if len(args.runs) < 2:
        raise SettingsError(f"one run ({args.runs[0]}) has nothing to be compared with; give at least two folders")
    compared: list[Compared] = load(args.runs)
    rewards = sorted(set(args.reward or (0.5, 0.8)))
    head = [*COLUMNS, *(name for reward in rewards for name in (f"time to {reward:g}", f"trajectories to {reward:g}"))]
    body = rows(compared, rewards)
    print_table(*transposed(head, body))
    try:
        args.output.write_text(compare_page(compared, head, body), encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--output {args.output}: cannot be written: {error.strerror}") from error
    print(args.output)
    return 0
