"""A plan for people and for programs: table, job settings, JSON, chart."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from pipelinerl_common.words import counted
from pipelinerl_planner.frontier import Point
from pipelinerl_planner.line_chart import Axes, write_line_chart
from pipelinerl_planner.plan_inputs import PlanInputs
from pipelinerl_planner.throughput import Workload, conventional, conventional_steps

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
