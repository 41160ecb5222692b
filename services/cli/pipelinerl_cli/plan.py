"""The flags of `pipelinerl plan`; without them it plans the paper's case study.

A plan for people and for programs: table, job settings, JSON, chart.

`pipelinerl plan`: how many GPUs should generate, with how many sequences each, for the lag that
one accepts.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from pipelinerl_common.text import counted
from pipelinerl_planner.frontier import Point
from pipelinerl_planner.line_chart import Axes, write_line_chart
from pipelinerl_planner.plan_inputs import PlanInputs
from pipelinerl_planner.throughput import (
    CASE_BATCH,
    CASE_GPUS,
    CASE_LENGTHS,
    CASE_TAU,
    Workload,
    conventional,
    conventional_steps,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--job",
        type=Path,
        metavar="FILE",
        help="take GPUs, batch, group size and longest response from a job",
    )
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help=f"GPUs, generating and training together (default {CASE_GPUS})",
    )
    parser.add_argument(
        "--batch",
        type=int,
        metavar="B",
        help=f"sequences of an optimizer step (default {CASE_BATCH})",
    )
    parser.add_argument(
        "--group-size", type=int, metavar="G", help="trajectories per prompt (default 8)"
    )
    parser.add_argument(
        "--lengths",
        metavar="WHAT",
        help="uniform:LEAST:MOST, lognormal:MEDIAN:SIGMA:CAP, or a trace (.csv or .jsonl) with "
        "response_tokens "
        f"(default {CASE_LENGTHS}, with --job uniform up to its maxTokens)",
    )
    parser.add_argument(
        "--tau",
        type=float,
        metavar="T",
        help=f"flashes of a GPU to train a token (default {CASE_TAU})",
    )
    parser.add_argument(
        "--train-tokens-per-second",
        type=float,
        metavar="R",
        help="of one training GPU, in place of --tau; needs --utilization",
    )
    parser.add_argument(
        "--utilization",
        type=Path,
        metavar="FILE",
        help="U(h) measured by `pipelinerl calibrate` (default: an H100's, built in)",
    )
    parser.add_argument(
        "--max-lag",
        type=int,
        metavar="STEPS",
        help="largest g_max (default: that of the greatest speed-up)",
    )
    parser.add_argument(
        "--max-running",
        type=int,
        default=512,
        metavar="H",
        help="largest H that is tried (default 512)",
    )
    parser.add_argument(
        "--gpus-per-node",
        type=int,
        default=8,
        metavar="K",
        help="of the trainers' nodes (default 8)",
    )
    parser.add_argument("--json", action="store_true", help="the plan as JSON on standard output")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="throughput over lag to a .svg or .html file"
    )


_MAX_ROWS = 24
"""Lines of the printed frontier; --json has all of it."""


def job_settings(inputs: PlanInputs, point: Point) -> dict[str, Any]:
    """The part of a job's `spec` that the plan decides, by the job file's names."""
    actors, tensor_parallel = inputs.grid.gpus_per_actor, inputs.tensor_parallel_size
    training = inputs.load.num_gpus - point.num_generating
    per_node = max(size for size in range(1, inputs.gpus_per_node + 1) if training % size == 0)
    return {
        "task": {"groupSize": inputs.group_size},
        "algorithm": {"groupsPerStep": inputs.load.batch_size // inputs.group_size},
        "staleness": {"policy": inputs.policy, "eta": point.max_lag},
        "actors": {
            "replicas": point.num_generating // actors,
            "generatorsPerReplica": actors // tensor_parallel,
            "gpusPerReplica": actors,
            "generator": {
                "tensorParallelSize": tensor_parallel,
                "maxRunningRequests": point.batch_per_gpu * tensor_parallel,
            },
        },
        "trainers": {"replicas": training // per_node, "processesPerNode": per_node},
    }


def plan_record(
    inputs: PlanInputs, points: Sequence[Point], point: Point, compared_lag: int
) -> dict[str, Any]:
    """The `--json` document; throughputs in tokens per flash."""
    return {
        "assumed": dict(inputs.assumed),
        "frontier": [_point_record(one) for one in points],
        "conventional": asdict(conventional(inputs.load, conventional_steps(compared_lag))),
        "chosen": _point_record(point),
        "settings": job_settings(inputs, point),
    }


def plan_text(inputs: PlanInputs, points: Sequence[Point], point: Point, compared_lag: int) -> str:
    """The table of the frontier, the comparison, and the settings as YAML."""
    load = inputs.load
    slow = conventional(load, conventional_steps(compared_lag))
    fast = point.throughput
    speed = load.utilization.peak_tokens_per_second
    in_seconds = f" ({fast.r * speed:,.0f} tokens/s)" if speed is not None else ""
    return "\n".join(
        [
            f"{load.num_gpus} GPUs, {counted(load.batch_size, 'sequence')} a step, lengths "
            f"{load.lengths.name} "
            f"(mean {load.lengths.mean:.0f}, longest {load.lengths.longest}), tau {load.tau:.3g} "
            "flashes a token",
            f"U(h): {load.utilization.source}",
            *_assumptions(inputs),
            "",
            _table(points, point),
            "H: sequences at once on one generating GPU; I: GPUs that generate; r: the slower of "
            "r_gen and r_train",
            "flash: the time of one token's forward pass at a GPU's peak; throughputs r in tokens "
            "per flash",
            "g_max: largest lag in optimizer steps, and exactly; speed-up over conventional RL of "
            "the same largest lag",
            "",
            f"conventional, lag {compared_lag} "
            f"({counted(conventional_steps(compared_lag), 'step')} a round): "
            f"r_gen {slow.r_gen:.2f}  r_train {slow.r_train:.2f}  r {slow.r:.2f}",
            f"in-flight, lag {point.max_lag}, H={point.batch_per_gpu}, I={point.num_generating} "
            f"({100 * point.num_generating / load.num_gpus:.0f} % of the GPUs): "
            f"r_gen {fast.r_gen:.2f}  r_train {fast.r_train:.2f}  r {fast.r:.2f}{in_seconds}, "
            f"{point.speedup:.2f} times as fast",
            "",
            "# for the job file",
            yaml.safe_dump({"spec": job_settings(inputs, point)}, sort_keys=False),
        ]
    )


def _assumptions(inputs: PlanInputs) -> list[str]:
    if not inputs.assumed:
        return []
    source = "the paper's case study" if inputs.job is None else "beside what the job says"
    told = ", ".join(f"{flag} {value}" for flag, value in inputs.assumed.items())
    own = "--job job.yaml for your job, and these flags" if inputs.job is None else "these flags"
    return [
        f"assumed ({source}): {told}",
        f"for your own numbers give {own}; `pipelinerl calibrate` measures --utilization",
    ]


def write_plot(path: Path, load: Workload, points: Sequence[Point], point: Point) -> None:
    """Raises SettingsError when the file cannot be written."""
    lags = sorted({1, *(one.max_lag for one in points)})
    lines = {
        "in-flight": [(float(one.max_lag), one.throughput.r) for one in points],
        "conventional": [
            (float(lag), conventional(load, conventional_steps(lag)).r) for lag in lags
        ],
    }
    title = (
        f"{load.num_gpus} GPUs, B={load.batch_size}: H={point.batch_per_gpu}, "
        f"I={point.num_generating}"
    )
    axes = Axes(title, "largest lag g_max (optimizer steps)", "tokens per flash")
    write_line_chart(path, axes, lines, (point.max_lag, point.throughput.r))


def _point_record(point: Point) -> dict[str, Any]:
    return {
        "H": point.batch_per_gpu,
        "I": point.num_generating,
        "g_max": point.max_lag,
        "g_max_exact": point.lag,
        **asdict(point.throughput),
        "speedup": point.speedup,
    }


def _table(points: Sequence[Point], chosen: Point) -> str:
    lines = [
        f"  {'g_max':>6} {'exact':>8} {'H':>5} {'I':>5} {'r_gen':>8} {'r_train':>8} {'r':>8} "
        f"{'speed-up':>9}"
    ]
    for point in _thinned(points, chosen):
        rates = point.throughput
        lines.append(
            f"{'>' if point is chosen else ' '} {point.max_lag:6} {point.lag:8.2f} "
            f"{point.batch_per_gpu:5} "
            f"{point.num_generating:5} {rates.r_gen:8.2f} {rates.r_train:8.2f} {rates.r:8.2f} "
            f"{point.speedup:9.2f}"
        )
    return "\n".join(lines)


def _thinned(points: Sequence[Point], chosen: Point) -> list[Point]:
    """At most _MAX_ROWS, evenly spread, both ends and the chosen one among them."""
    if len(points) <= _MAX_ROWS:
        return list(points)
    kept = {round(row * (len(points) - 1) / (_MAX_ROWS - 2)) for row in range(_MAX_ROWS - 1)}
    return [point for index, point in enumerate(points) if index in kept or point is chosen]


__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Prints the plan. Returns the exit status; raises SettingsError for arguments that make no
    sense.
    """
    from pipelinerl_common.errors import SettingsError
    from pipelinerl_planner.frontier import chosen, frontier
    from pipelinerl_planner.plan_inputs import read_inputs

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
