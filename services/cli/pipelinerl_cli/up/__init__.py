"""`pipelinerl up job.yaml`: the operator's plan, carried out as local processes.

Here are its arguments; `session` does the work and is imported when it is needed.
"""

import argparse
from pathlib import Path

from pipelinerl_cli.terminal import at_least_one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", type=Path, help="the job file (YAML)")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="the run's folder, by default runs/<job name>; a run in it is resumed",
    )
    parser.add_argument(
        "--max-steps",
        type=at_least_one,
        metavar="N",
        help="optimizer steps, in place of algorithm.steps",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="another value for a setting below spec; repeatable",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="start over; an older run in the folder is moved aside"
    )


def run(args: argparse.Namespace) -> int:
    """0: finished; 1: failed; 2: bad input; 130, 143, 129: stopped by SIGINT, SIGTERM, SIGHUP."""
    from pipelinerl_cli.up.session import up

    overrides = list(args.set)
    if args.max_steps is not None:
        overrides.append(f"algorithm.steps={args.max_steps}")
    return up(args.job, output=args.output, overrides=overrides, fresh=args.fresh)
