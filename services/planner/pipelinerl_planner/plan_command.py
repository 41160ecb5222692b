"""`pipelinerl plan`: how many GPUs should generate, with how many sequences each, for the lag that
one accepts.
"""

import argparse
import json
import sys

from pipelinerl_planner.plan_arguments import add_arguments

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Prints the plan. Returns the exit status; raises SettingsError for arguments that make no
    sense.
    """
    from pipelinerl_common.errors import SettingsError
    from pipelinerl_planner.frontier import chosen, frontier
    from pipelinerl_planner.plan_inputs import read_inputs
    from pipelinerl_planner.plan_report import plan_record, plan_text, write_plot

    inputs = read_inputs(args)
    points = frontier(inputs.load, inputs.grid)
    if not points:
        raise SettingsError(
            f"no pair of H and I keeps --max-lag {args.max_lag} with a batch of "
            f"{inputs.load.batch_size}: "
            "allow more lag or take a larger batch"
        )
    point = chosen(points, args.max_lag)
    compared_lag = point.max_lag if args.max_lag is None else args.max_lag
    if args.plot is not None:
        write_plot(args.plot, inputs.load, points, point)
    if args.json:
        sys.stdout.write(
            json.dumps(plan_record(inputs, points, point, compared_lag), indent=1) + "\n"
        )
    else:
        sys.stdout.write(plan_text(inputs, points, point, compared_lag))
    return 0
