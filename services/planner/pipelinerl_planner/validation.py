"""A recorded live run against its simulation: a model fitted to the parts, checked on the whole.

Taken from the run: lengths in dispatch order, the time of every training step and publish, and the
costs of `fit`. Not taken: when anything was admitted, how many sequences ran, how full the cache
was, how long it all took.
"""

from dataclasses import dataclass
from pathlib import Path

from pipelinerl_planner.cluster import Cluster
from pipelinerl_planner.fit import fit_cluster, recorded_lengths
from pipelinerl_planner.outcome import Outcome
from pipelinerl_planner.recorded_run import RecordedRun, read_recorded_run
from pipelinerl_planner.simulation import Run, simulate
from pipelinerl_staleness.registry import make_policy


@dataclass(frozen=True, slots=True)
class Comparison:
    """One quantity. Example: Comparison("duration", "s", 95.2, 94.9), difference -0.3 %."""

    quantity: str
    unit: str
    measured: float
    simulated: float

    @property
    def difference(self) -> float:
        """Relative to what was measured."""
        return self.simulated / self.measured - 1 if self.measured else 0.0


@dataclass(frozen=True, slots=True)
class Validation:
    run: RecordedRun
    cluster: Cluster
    outcome: Outcome

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        run, outcome = self.run, self.outcome
        return (
            Comparison("duration", "s", run.seconds, outcome.wall_seconds),
            Comparison("requests in flight, mean", "", run.mean_running, outcome.mean_running),
            Comparison("KV use, mean", "%", 100 * run.mean_kv_usage, 100 * outcome.mean_kv_usage),
        )


def validate(folder: Path) -> Validation:
    """Raises ValueError or SettingsError for a folder that lacks what is needed."""
    run = read_recorded_run(folder)
    cluster = fit_cluster(run)
    steps = [run.steps[step] for step in sorted(run.steps)]
    publishes = [
        run.published.get(number + 1, times.done + cluster.publish_s) - times.done
        for number, times in enumerate(steps)
    ]
    simulated = Run(
        cluster=cluster,
        lengths=recorded_lengths(run),
        num_steps=run.num_steps,
        train_seconds=tuple(times.done - times.taken for times in steps),
        publish_seconds=tuple(max(0.0, seconds) for seconds in publishes),
    )
    return Validation(
        run, cluster, simulate(make_policy(run.settings, run.groups_per_step), simulated)
    )
