"""`pipelinerl plan`: how many GPUs should generate, with how many sequences each, for an accepted
lag. Without flags it plans the paper's case study; with `--gpu-memory` it says whether a job fits
its GPUs.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelinerl_planner.throughput import (
    CASE_BATCH,
    CASE_GPUS,
    CASE_LENGTHS,
    CASE_TAU,
    FrontierPoint,
    chosen,
    conventional,
    conventional_steps,
    frontier,
)

if TYPE_CHECKING:
    from pipelinerl_cli.plan_inputs import PlanInputs

MAX_ROWS = 24
"""Rows of the printed frontier; --json has all of it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def add(flag: str, kind: type, metavar: str, help_text: str, default: Any = None) -> None:
        parser.add_argument(flag, type=kind, metavar=metavar, help=help_text, default=default)

    add("--job", Path, "FILE", "take GPUs, batch, group size and longest response from a job")
    add("--gpus", int, "N", f"GPUs, generating and training together (default {CASE_GPUS})")
    add("--batch", int, "B", f"sequences of an optimizer step (default {CASE_BATCH})")
    add("--group-size", int, "G", "trajectories per prompt (default 8)")
    add(
        "--lengths",
        str,
        "WHAT",
        "uniform:LEAST:MOST, lognormal:MEDIAN:SIGMA:CAP, or a trace (.csv or .jsonl) with "
        f"response_tokens (default {CASE_LENGTHS}, with --job uniform up to its maxTokens)",
    )
    add("--tau", float, "T", f"flashes of a GPU to train a token (default {CASE_TAU})")
    add(
        "--train-tokens-per-second",
        float,
        "R",
        "of one training GPU, in place of --tau; needs --utilization",
    )
    add(
        "--utilization",
        Path,
        "FILE",
        "U(h) measured by `pipelinerl calibrate` (default: an H100's, built in)",
    )
    add("--max-lag", int, "STEPS", "largest g_max (default: that of the greatest speed-up)")
    add("--max-running", int, "H", "largest H that is tried (default 512)", 512)
    add("--gpu-memory", float, "GB", "instead: whether the --job fits GPUs of this size")
    add("--model", Path, "FOLDER", "with --gpu-memory: where the model's config.json is")
    add("--gpus-per-node", int, "K", "of the trainers' nodes (default 8)", 8)
    parser.add_argument("--json", action="store_true", help="the plan as JSON on standard output")
    add("--plot", Path, "FILE", "throughput over lag to a .svg or .html file")


def run(args: argparse.Namespace) -> int:
    """Prints the plan. Returns the exit status; raises SettingsError for bad arguments."""
    from pipelinerl_cli.plan_inputs import read_inputs
    from pipelinerl_cli.plan_memory import plan_memory
    from pipelinerl_common.errors import SettingsError

    if args.gpu_memory is not None:
        return plan_memory(args)

    inputs = read_inputs(args)
    points = frontier(inputs.load, inputs.grid)
    if not points:
        raise SettingsError(
            f"no pair of H and I keeps --max-lag {args.max_lag} with a batch of "
            f"{inputs.load.batch_size}: allow more lag or take a larger batch"
        )
    point = chosen(points, args.max_lag)
    compared_lag = point.max_lag if args.max_lag is None else args.max_lag
    if args.plot is not None:
        _write_plot(args.plot, inputs, points, point)
    if args.json:
        document = _document(inputs, points, point, compared_lag)
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
    else:
        _print_plan(inputs, points, point, compared_lag)
    return 0


def job_settings(inputs: "PlanInputs", point: FrontierPoint) -> dict[str, Any]:
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


def _document(
    inputs: "PlanInputs", points: Sequence[FrontierPoint], point: FrontierPoint, compared_lag: int
) -> dict[str, Any]:
    """The `--json` document; throughputs in tokens per flash."""
    return {
        "assumed": dict(inputs.assumed),
        "frontier": [_point_document(one) for one in points],
        "conventional": asdict(conventional(inputs.load, conventional_steps(compared_lag))),
        "chosen": _point_document(point),
        "settings": job_settings(inputs, point),
    }


def _point_document(point: FrontierPoint) -> dict[str, Any]:
    return {
        "H": point.batch_per_gpu,
        "I": point.num_generating,
        "g_max": point.max_lag,
        "g_max_exact": point.lag,
        **asdict(point.throughput),
        "speedup": point.speedup,
    }


def _print_plan(
    inputs: "PlanInputs", points: Sequence[FrontierPoint], point: FrontierPoint, compared_lag: int
) -> None:
    """The table of the frontier, the comparison, and the settings as YAML."""
    import yaml

    from pipelinerl_cli.terminal import print_table
    from pipelinerl_common.text import counted

    load, lengths = inputs.load, inputs.load.lengths
    num_steps = conventional_steps(compared_lag)
    slow, fast = conventional(load, num_steps), point.throughput
    speed = load.utilization.peak_tokens_per_second
    in_seconds = f" ({fast.r * speed:,.0f} tokens/s)" if speed is not None else ""
    print(
        f"{load.num_gpus} GPUs, {counted(load.batch_size, 'sequence')} a step, lengths "
        f"{lengths.name} (mean {lengths.mean:.0f}, longest {lengths.longest}), "
        f"tau {load.tau:.3g} flashes a token"
    )
    print(f"U(h): {load.utilization.source}")
    _print_assumptions(inputs)
    print()
    rows = [_row(each, is_chosen=each is point) for each in _thinned(points, point)]
    print_table(["", "g_max", "exact", "H", "I", "r_gen", "r_train", "r", "speed-up"], rows)
    print(
        "H: sequences at once on one generating GPU; I: GPUs that generate; r: the slower of r_gen "
        "and r_train\n"
        "flash: the time of one token's forward pass at a GPU's peak; throughputs r in tokens per "
        "flash\n"
        "g_max: largest lag in optimizer steps, and exactly; speed-up over conventional RL of the "
        "same largest lag\n\n"
        f"conventional, lag {compared_lag} ({counted(num_steps, 'step')} a round): "
        f"r_gen {slow.r_gen:.2f}  r_train {slow.r_train:.2f}  r {slow.r:.2f}\n"
        f"in-flight, lag {point.max_lag}, H={point.batch_per_gpu}, I={point.num_generating} "
        f"({100 * point.num_generating / load.num_gpus:.0f} % of the GPUs): "
        f"r_gen {fast.r_gen:.2f}  r_train {fast.r_train:.2f}  r {fast.r:.2f}{in_seconds}, "
        f"{point.speedup:.2f} times as fast\n{_warning(point)}\n"
        "# for the job file\n"
        + yaml.safe_dump({"spec": job_settings(inputs, point)}, sort_keys=False),
        end="",
    )


def _warning(point: FrontierPoint) -> str:
    """A line where the chosen lag is larger than any that was studied: the model is of speed."""
    from pipelinerl_common.judgements import PLANNED_LAG

    if not PLANNED_LAG.is_beyond(point.max_lag):
        return ""
    return (
        f"warning: lag {point.max_lag} is chosen for its speed alone, and {PLANNED_LAG.meaning} "
        f"than {PLANNED_LAG.limit:g} steps; --max-lag bounds it\n"
    )


def _print_assumptions(inputs: "PlanInputs") -> None:
    if not inputs.assumed:
        return
    source, own = "beside what the job says", "these flags"
    if inputs.job is None:
        source, own = "the paper's case study", "--job job.yaml for your job, and these flags"
    values = ", ".join(f"{flag} {value}" for flag, value in inputs.assumed.items())
    print(f"assumed ({source}): {values}")
    print(f"for your own numbers give {own}; `pipelinerl calibrate` measures --utilization")


def _row(point: FrontierPoint, *, is_chosen: bool) -> list[str]:
    rates = point.throughput
    sizes = (point.batch_per_gpu, point.num_generating)
    speeds = (rates.r_gen, rates.r_train, rates.r, point.speedup)
    return [
        ">" if is_chosen else "",
        str(point.max_lag),
        f"{point.lag:.2f}",
        *map(str, sizes),
        *(f"{speed:.2f}" for speed in speeds),
    ]


def _thinned(points: Sequence[FrontierPoint], chosen_point: FrontierPoint) -> list[FrontierPoint]:
    """At most MAX_ROWS, evenly spread, both ends and the chosen one among them."""
    if len(points) <= MAX_ROWS:
        return list(points)
    kept = {round(row * (len(points) - 1) / (MAX_ROWS - 2)) for row in range(MAX_ROWS - 1)}
    return [point for k, point in enumerate(points) if k in kept or point is chosen_point]


def _write_plot(
    path: Path, inputs: "PlanInputs", points: Sequence[FrontierPoint], point: FrontierPoint
) -> None:
    """Raises SettingsError when the file cannot be written."""
    from pipelinerl_cli.report.charts import svg_file, write_chart
    from pipelinerl_cli.report.svg import Axis, Line

    load = inputs.load
    lags = sorted({1, *(one.max_lag for one in points)})
    slow = [conventional(load, conventional_steps(lag)).r for lag in lags]
    fast = [one.throughput.r for one in points]
    title = (
        f"{load.num_gpus} GPUs, B={load.batch_size}: H={point.batch_per_gpu}, "
        f"I={point.num_generating}"
    )
    lines = [
        Line("in-flight", [one.max_lag for one in points], fast),
        Line("conventional", lags, slow, 1),
    ]
    x = Axis("largest lag g_max (optimizer steps)", low=0)
    y = Axis("tokens per flash", low=0)
    mark = (point.max_lag, point.throughput.r)
    write_chart(path, title, svg_file(title, x, y, lines, mark))
