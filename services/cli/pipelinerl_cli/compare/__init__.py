"""`pipelinerl compare A B [...]`: prints a table and writes a page with the learning curves.

Runs that differ in nothing but their seed are one column and one line, with the range of the runs
around it.
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="DIR", help="folders of two or more runs"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("compare.html"),
        metavar="FILE",
        help="default compare.html",
    )
    parser.add_argument(
        "--reward",
        type=float,
        action="append",
        metavar="R",
        help="reward whose reaching is timed; repeatable; default 0.5, 0.8",
    )


def run(args: argparse.Namespace) -> int:
    from pipelinerl_cli.compare.page import compare_page
    from pipelinerl_cli.compare.runs import load, variants
    from pipelinerl_cli.compare.table import differences, note, table, warning
    from pipelinerl_cli.terminal import print_table
    from pipelinerl_common.errors import SettingsError

    if len(args.runs) < 2:
        raise SettingsError(
            f"one run ({args.runs[0]}) has nothing to be compared with; give at least two folders"
        )
    compared = variants(load(args.runs))
    head, rows = table(compared, sorted(set(args.reward or (0.5, 0.8))))
    if warned := warning(compared):
        print(warned)
    if differing := differences(compared):
        print_table(["setting", *head[1:]], differing)
        print()
    print_table(head, rows)
    print(note(compared))
    try:
        args.output.write_text(compare_page(compared, head, rows, note(compared)), encoding="utf-8")
    except OSError as error:
        raise SettingsError(
            f"--output {args.output}: cannot be written: {error.strerror}"
        ) from error
    print(args.output)
    return 0
