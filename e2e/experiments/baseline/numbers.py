"""Numbers of one run, ratios between settings over the seeds, and the most that overlap could
bring.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from experiments.baseline import cores
from pipelinerl_cli.compare.runs import Compared
from pipelinerl_planner.recorded_run import read_recorded_run

CONFIDENCE = 0.95
NUM_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class RunNumbers:
    """The numbers of one run, from its first generated token to its last step; None where the run
    has no such number.
    """

    setting: str
    seed: int
    steps: int
    seconds_to_goal: float | None
    trajectories_to_goal: float | None
    tokens_to_goal: float | None
    reward_last: float | None
    lag_mean: float | None
    lag_max: float | None
    ess_mean: float | None
    ess_min: float | None
    trajectories_per_second: float
    tokens_per_second: float
    """Trajectories trained."""
    seconds_per_step: float
    training_s: float
    """Seconds per step in which the trainer does anything but wait for its batch."""
    generator_busy: float | None
    """Share of the time in which the engine decodes; None where too little was recorded."""
    cores_by_role: dict[str, float]
    """Cores in use on average; empty where they were not measured."""
    cores_of_others: float
    """Cores used by everything else on the machine."""

    @property
    def generation_s(self) -> float:
        """Seconds per step in which the trainer waits for its batch."""
        return self.seconds_per_step - self.training_s

    @property
    def core_seconds(self) -> float:
        """Core-seconds per step of all processes of the run; 0 where they were not measured."""
        return sum(self.cores_by_role.values()) * self.seconds_per_step


def numbers_of(run: Compared, setting: str, goal: float) -> RunNumbers:
    steps = run.history.steps
    end = steps[-1].t
    reached = run.first_reaching(goal)
    training = [step.get("step_seconds") - step.get("wait_seconds") for step in steps]
    uses = cores.read(run.root.with_name(f"{run.root.name}.cores.jsonl"))
    inside = [use for use in uses if 0 <= run.history.at(use.time) <= end]
    used = cores.between(inside)
    summary = run.summary
    return RunNumbers(
        setting=setting,
        seed=run.job.spec.seed,
        steps=len(steps),
        seconds_to_goal=reached.t if reached else None,
        trajectories_to_goal=reached.samples if reached else None,
        tokens_to_goal=reached.tokens if reached else None,
        reward_last=summary["reward_last"],
        lag_mean=summary["lag_mean"],
        lag_max=summary["lag_max"],
        ess_mean=summary["ess_mean"],
        ess_min=summary["ess_min"],
        trajectories_per_second=steps[-1].samples / end,
        tokens_per_second=steps[-1].tokens / end,
        seconds_per_step=end / len(steps),
        training_s=fmean(training),
        generator_busy=_generator_busy(run.root),
        cores_by_role=used.by_role if used else {},
        cores_of_others=used.others if used else 0.0,
    )


def _generator_busy(root: Path) -> float | None:
    try:
        loads = read_recorded_run(root).settled_loads()
    except ValueError:  # too short a run
        return None
    first, last = loads[0], loads[-1]
    return (last.step_seconds - first.step_seconds) / (last.at - first.at) / last.num_generators


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of means and its 95 % interval. Example: Ratio(1.62, 1.51, 1.74, 5) over 5 seeds."""

    value: float
    low: float
    high: float
    num_pairs: int


def paired_ratio(above: Sequence[float | None], below: Sequence[float | None]) -> Ratio | None:
    """Mean of `above` over mean of `below`, where value k of both is of the same seed, by the
    percentile bootstrap over seeds.

    Seeds in which either has no value are left out; None without any other. One seed has an
    interval of no width.
    """
    pairs = [(a, b) for a, b in zip(above, below, strict=True) if a is not None and b is not None]
    if not pairs:
        return None
    values = np.asarray(pairs, dtype=np.float64)
    drawn = values[
        np.random.default_rng(0).integers(0, len(pairs), (NUM_RESAMPLES, len(pairs)))
    ].mean(axis=1)
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    mean = values.mean(axis=0)
    return Ratio(float(mean[0] / mean[1]), float(low), float(high), len(pairs))


@dataclass(frozen=True, slots=True)
class Overlap:
    """The most that concurrent generation and training can gain over one after the other. Seconds
    are per step.
    """

    generation_s: float
    training_s: float
    """Seconds of conventional RL, each phase with the machine for itself."""
    core_seconds: float
    """Core-seconds of all processes of the in-flight runs; 0 where unknown."""
    num_cores: int

    @property
    def least_s(self) -> float:
        """Seconds of the shortest step: the longer phase, or the work shared by all cores."""
        return max(self.generation_s, self.training_s, self.core_seconds / self.num_cores)

    @property
    def speed_up_of_phases(self) -> float:
        """(generation + training) / max(generation, training): appendix A of the paper with one
        core for each, where conventional r = 1 / (1/r_gen + 1/r_train) and in-flight r = min(r_gen,
        r_train).
        """
        return (self.generation_s + self.training_s) / max(self.generation_s, self.training_s)

    @property
    def speed_up(self) -> float:
        """The same, limited by the cores that the work of both needs."""
        return (self.generation_s + self.training_s) / self.least_s


def overlap(
    conventional: Sequence[RunNumbers], in_flight: Sequence[RunNumbers], num_cores: int
) -> Overlap:
    """The bound from means over the runs, at least one of each kind."""
    return Overlap(
        fmean(run.generation_s for run in conventional),
        fmean(run.training_s for run in conventional),
        fmean(run.core_seconds for run in in_flight),
        num_cores,
    )
