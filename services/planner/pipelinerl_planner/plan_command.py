"""`pipelinerl plan`: how many GPUs should generate, with how many sequences each, for the lag that one accepts."""

import argparse
import json
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from pipelinerl_planner import plan_inputs

    plan_inputs.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="the plan as JSON on standard output")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="throughput over lag to a .svg or .html file")


def run(args: argparse.Namespace) -> int:
    """Prints the plan. Returns the exit status; raises SettingsError for arguments that make no sense."""
    from pipelinerl_common.errors import SettingsError
    from pipelinerl_planner.frontier import chosen, frontier
    from pipelinerl_planner.plan_inputs import read_inputs
    from pipelinerl_planner.plan_report import plan_record, plan_text, write_plot

    inputs = read_inputs(args)
    points = frontier(inputs.load, inputs.grid)
    if not points:
        raise SettingsError(
            f"no pair of H and I keeps --max-lag {args.max_lag} with a batch of {inputs.load.batch_size}: "
            "allow more lag or take a larger batch"
        )
    point = chosen(points, args.max_lag)
    compared_lag = point.max_lag if args.max_lag is None else args.max_lag
    if args.plot is not None:
        write_plot(args.plot, inputs.load, points, point)
    if args.json:
        sys.stdout.write(json.dumps(plan_record(inputs, points, point, compared_lag), indent=1) + "\n")
    else:
        sys.stdout.write(plan_text(inputs, points, point, compared_lag))
    return 0
