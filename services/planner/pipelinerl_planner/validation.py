"""A recorded live run against its simulation: a cost model fitted to the parts of the run, checked
on the whole.

Taken from the run: lengths in dispatch order, the time of every training step and publish, and the
costs of decode steps, training, publishes and pauses (`fit_cluster`). Not taken: admission times,
the number of running sequences, the use of the KV cache, the duration. These are what the
simulation is compared by.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from pipelinerl_planner.cluster import SimulatedCluster
from pipelinerl_planner.lengths import TraceLengths
from pipelinerl_planner.outcome import SimulationOutcome
from pipelinerl_planner.recorded_run import LoadSums, RecordedRun, read_recorded_run
from pipelinerl_planner.simulation import SimulationRun, simulate
from pipelinerl_staleness.registry import make_policy

_LEASED_AHEAD = 1.25
"""Actors lease a quarter more trajectories than fill the generators."""
_NEGLIGIBLE = 1e-9


def fit_cluster(run: RecordedRun) -> SimulatedCluster:
    """Returns the cost model of a run. All engines are assumed to be equal."""
    generator = run.job.spec.actors.generator
    loads = run.settled_loads()
    num_engines = loads[-1].num_generators
    step_s, sequence_s, token_s, prefill_s = _decode_costs(loads, _context_steps(run))
    train_s, train_token_s = _training_costs(run)
    publishes = [
        run.published[step + 1] - times.done
        for step, times in run.steps.items()
        if step + 1 in run.published
    ]
    publish_s = fmean(publishes) if publishes else 0.0
    gaps = [
        run.steps[step + 1].asked - times.done
        for step, times in run.steps.items()
        if step + 1 in run.steps
    ]
    return SimulatedCluster(
        num_engines=num_engines,
        kv_tokens=loads[-1].kv_tokens // num_engines,
        block_tokens=loads[-1].block_tokens,
        keeps_kv=run.job.spec.weight_transfer.kv_cache == "keep",
        max_sequences=generator.max_running_requests,
        decode_step_s=max(step_s, _NEGLIGIBLE),
        decode_sequence_s=sequence_s,
        decode_token_s=token_s,
        prefill_tokens_per_s=1 / max(prefill_s, _NEGLIGIBLE),
        publish_s=publish_s,
        pause_s=min(fmean(run.pauses), publish_s),
        train_tokens_per_s=1 / max(train_token_s, _NEGLIGIBLE),
        train_step_s=train_s,
        request_s=_request_seconds(loads),
        train_gap_s=max(0.0, fmean(gaps)) if gaps else 0.0,
        finish_s=fmean(run.ways) if run.ways else 0.0,
        max_leased=int(_LEASED_AHEAD * num_engines * generator.max_running_requests),
    )


def recorded_lengths(run: RecordedRun) -> TraceLengths:
    """Returns lengths in dispatch order, without groups that were still running at the end;
    repeated after the last one.
    """
    return TraceLengths(tuple(run.lengths[group] for group in run.admitted if group in run.lengths))


def _context_steps(run: RecordedRun) -> float:
    """Returns the tokens of context that all decode steps have read: for one sequence its prompt
    and all tokens sampled before, at every step.
    """
    return float(
        sum(
            prompt * tokens + tokens * (tokens - 1) / 2
            for prompt, sampled in run.lengths.values()
            for tokens in sampled
        )
    )


def _decode_costs(loads: list[LoadSums], context_steps: float) -> tuple[float, float, float, float]:
    """Returns seconds per step, per running sequence and step, per token of context and step, and
    per prefilled token: least squares over the times between two reports. The context's
    distribution over these is taken from the KV use, which has whole blocks only; its total from
    the lengths.
    """
    rows, seconds = [], []
    for before, after in pairwise(loads):
        steps = after.num_steps - before.num_steps
        elapsed = after.at - before.at
        if steps > 0 and elapsed > 0:
            usage = (
                (after.kv_usage_seconds - before.kv_usage_seconds) / elapsed / after.num_generators
            )
            context = usage * after.kv_tokens
            tokens, prefilled = (
                after.step_tokens - before.step_tokens,
                after.prefill_tokens - before.prefill_tokens,
            )
            rows.append((steps, tokens, steps * context, prefilled))
            seconds.append(after.step_seconds - before.step_seconds)
    table = np.array(rows, dtype=float)
    if table[:, 2].sum() > 0:
        table[:, 2] *= context_steps / table[:, 2].sum()
    a, b, c, d = _non_negative_fit(table, np.array(seconds))
    return a, b, c, d


def _request_seconds(loads: list[LoadSums]) -> float:
    """Returns the seconds that a request takes beside its decoding: the time that a sequence is
    waited for minus the time that it runs, per answer.
    """
    first, last = loads[0], loads[-1]
    beside = (last.requested_seconds - first.requested_seconds) - (
        last.running_seconds - first.running_seconds
    )
    return max(0.0, beside) / max(1.0, last.num_answered - first.num_answered)


def _training_costs(run: RecordedRun) -> tuple[float, float]:
    """Returns seconds per step and per sampled token: from the whole batch to its commit, or the
    trainer's own time where the batch arrives while it is trained.
    """
    rows = np.array([(1.0, times.tokens) for times in run.steps.values()])
    streams = make_policy(run.settings, run.groups_per_step).streams
    seconds = np.array(
        [times.trained_s if streams else times.done - times.taken for times in run.steps.values()]
    )
    step_s, token_s = _non_negative_fit(rows, seconds)
    return step_s, token_s


def _non_negative_fit(rows_NK: NDArray[np.float64], values_N: NDArray[np.float64]) -> list[float]:
    """Fits by least squares with no negative cost, scaled so that the sum of the values is met: the
    most negative cost is left out until none is negative.
    """
    kept = list(range(rows_NK.shape[1]))
    while True:
        scale_K = np.maximum(np.abs(rows_NK[:, kept]).max(axis=0), 1e-30)
        fitted = np.linalg.lstsq(rows_NK[:, kept] / scale_K, values_N, rcond=None)[0] / scale_K
        if len(kept) == 1 or fitted.min() >= 0:
            break
        kept.pop(int((fitted * scale_K).argmin()))
    costs = np.zeros(rows_NK.shape[1])
    costs[kept] = np.maximum(fitted, 0)
    fitted_sum = float((rows_NK @ costs).sum())
    scale = float(values_N.sum()) / fitted_sum if fitted_sum > 0 else 1.0
    return [float(cost) * scale for cost in costs]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One quantity. Example: Comparison("duration", "s", 95.2, 94.9), difference -0.3 %."""

    quantity: str
    unit: str
    measured: float
    simulated: float

    @property
    def difference(self) -> float:
        """Relative difference of the simulated from the measured value."""
        return self.simulated / self.measured - 1 if self.measured else 0.0


@dataclass(frozen=True, slots=True)
class Validation:
    """A recorded run, its cost model and its simulation."""

    run: RecordedRun
    cluster: SimulatedCluster
    outcome: SimulationOutcome

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        run, outcome = self.run, self.outcome
        return (
            Comparison("duration", "s", run.seconds, outcome.wall_seconds),
            Comparison("requests in flight, mean", "", run.mean_running, outcome.mean_running),
            Comparison("KV use, mean", "%", 100 * run.mean_kv_usage, 100 * outcome.mean_kv_usage),
        )


def validate(folder: Path) -> Validation:
    """Simulates a recorded run. Raises ValueError or SettingsError for a folder that lacks data."""
    run = read_recorded_run(folder)
    cluster = fit_cluster(run)
    steps = [run.steps[step] for step in sorted(run.steps)]
    publishes = [
        run.published.get(number + 1, times.done + cluster.publish_s) - times.done
        for number, times in enumerate(steps)
    ]
    simulated = SimulationRun(
        cluster=cluster,
        lengths=recorded_lengths(run),
        num_steps=run.num_steps,
        train_seconds=tuple(times.done - times.taken for times in steps),
        publish_seconds=tuple(max(0.0, seconds) for seconds in publishes),
    )
    return Validation(
        run, cluster, simulate(make_policy(run.settings, run.groups_per_step), simulated)
    )
