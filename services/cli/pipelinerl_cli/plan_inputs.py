"""What `pipelinerl plan` plans for: from flags, from a job file, or the paper's case study."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd

from pipelinerl_cli.terminal import at_least, positive
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import Job, load_job
from pipelinerl_planner.lengths import parse_lengths
from pipelinerl_planner.throughput import (
    CASE_BATCH,
    CASE_GPUS,
    CASE_LENGTHS,
    CASE_TAU,
    Grid,
    PlanWorkload,
)
from pipelinerl_planner.utilization import FittedCurve, Utilization, read_utilization

MAX_PAIRS = 5_000_000
"""A search over more would take gigabytes: each pair takes about 100 bytes."""


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Everything that a plan is computed from."""

    load: PlanWorkload
    grid: Grid
    group_size: int
    """Trajectories per prompt."""
    gpus_per_node: int
    """Most trainer ranks of one node."""
    job: Job | None
    assumed: Mapping[str, str]
    """Defaults that were used, by flag. Example: {"--tau": "4.92"}."""

    @property
    def tensor_parallel_size(self) -> int:
        return 1 if self.job is None else self.job.spec.actors.generator.tensor_parallel_size

    @property
    def policy(self) -> str:
        """The job's staleness policy where it has a parameter eta, else areal."""
        if self.job is not None and "eta" in self.job.spec.staleness.parse().parameter_names():
            return self.job.spec.staleness.policy
        return "areal"


def read_inputs(args: argparse.Namespace) -> PlanInputs:
    """Raises SettingsError that names the flag or field, its value and the remedy."""
    job = None if args.job is None else load_job(args.job)
    num_gpus = at_least(2, "--gpus", _gpus(job) if args.gpus is None else args.gpus)
    group_size, batch_size = _batch(args, job)
    utilization: Utilization = (
        FittedCurve() if args.utilization is None else read_utilization(args.utilization)
    )
    default_lengths = (
        CASE_LENGTHS if job is None else f"uniform:1:{job.spec.task.sampling.max_tokens}"
    )
    lengths = parse_lengths(args.lengths or default_lengths, group_size)
    gpus_per_actor = 1
    if job is not None:
        gpus_per_actor = (
            job.spec.actors.generators_per_replica * job.spec.actors.generator.tensor_parallel_size
        )
    if gpus_per_actor >= num_gpus:
        raise SettingsError(
            f"--gpus {num_gpus}: one actor of the job takes {gpus_per_actor} and leaves none to "
            "train"
        )
    if args.max_lag is not None:
        at_least(1, "--max-lag", args.max_lag)
    grid = Grid(at_least(1, "--max-running", args.max_running), gpus_per_actor, args.max_lag)
    if grid.num_pairs(num_gpus) > MAX_PAIRS:
        raise SettingsError(
            f"--gpus {num_gpus} with --max-running {grid.most_per_gpu}: "
            f"{grid.num_pairs(num_gpus):,} pairs of H and I are more "
            f"than the {MAX_PAIRS:,} that are searched: plan for fewer GPUs, or for a smaller "
            "--max-running"
        )
    load = PlanWorkload(num_gpus, batch_size, lengths, _tau(args, utilization), utilization)
    gpus_per_node = at_least(1, "--gpus-per-node", args.gpus_per_node)
    return PlanInputs(load, grid, group_size, gpus_per_node, job, _assumed(args, default_lengths))


def _assumed(args: argparse.Namespace, lengths: str) -> dict[str, str]:
    in_job = args.job is not None
    defaults = {
        "--gpus": (str(CASE_GPUS), in_job or args.gpus is not None),
        "--batch": (str(CASE_BATCH), in_job or args.batch is not None),
        "--lengths": (lengths, args.lengths is not None),
        "--tau": (f"{CASE_TAU}", args.tau is not None or args.train_tokens_per_second is not None),
        "--utilization": ("an H100's", args.utilization is not None),
        "--max-lag": ("any, for the greatest speed-up", args.max_lag is not None),
    }
    return {flag: value for flag, (value, is_given) in defaults.items() if not is_given}


def _gpus(job: Job | None) -> int:
    if job is None:
        return CASE_GPUS
    actors, trainers = job.spec.actors, job.spec.trainers
    if actors.gpus_per_replica == 0:
        raise SettingsError(
            "actors.gpusPerReplica=0: the job uses no GPU; say how many to plan for with --gpus"
        )
    return (
        job.spec.most_actors * actors.gpus_per_replica
        + trainers.replicas * trainers.processes_per_node
    )


def _batch(args: argparse.Namespace, job: Job | None) -> tuple[int, int]:
    """Trajectories of a group and of an optimizer step."""
    if job is None:
        batch = at_least(1, "--batch", CASE_BATCH if args.batch is None else args.batch)
        group_size = gcd(batch, 8) if args.group_size is None else args.group_size
    else:
        group_size = job.spec.task.group_size if args.group_size is None else args.group_size
        batch = (
            job.spec.algorithm.groups_per_step * group_size if args.batch is None else args.batch
        )
    at_least(1, "--batch", batch)
    at_least(1, "--group-size", group_size)
    if batch % group_size:
        raise SettingsError(
            f"--batch {batch} must be a multiple of the group size {group_size}: set --group-size"
        )
    return group_size, batch


def _tau(args: argparse.Namespace, utilization: Utilization) -> float:
    if args.train_tokens_per_second is None:
        return positive("--tau", CASE_TAU if args.tau is None else args.tau)
    if args.tau is not None:
        raise SettingsError(
            f"--tau {args.tau:g} and --train-tokens-per-second {args.train_tokens_per_second:g}: "
            "give one of them"
        )
    if utilization.peak_tokens_per_second is None:
        raise SettingsError(
            f"--train-tokens-per-second {args.train_tokens_per_second:g}: how long a flash is must "
            "be known; "
            "give --utilization with a file of `pipelinerl calibrate`, or --tau"
        )
    return utilization.peak_tokens_per_second / positive(
        "--train-tokens-per-second", args.train_tokens_per_second
    )
