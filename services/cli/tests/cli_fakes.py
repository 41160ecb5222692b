"""Small runs made by hand, as records: a healthy one, and what is changed in it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipelinerl_common.runs.facts import RunFacts
from pipelinerl_common.runs.records import Record
from pipelinerl_common.settings import Job, parse_job

NUM_STEPS = 40
STEP_S = 10.0

JOB: Mapping[str, Any] = {
    "apiVersion": "pipelinerl.dev/v1alpha1",
    "kind": "PipelineRLJob",
    "metadata": {"name": "healthy"},
    "spec": {
        "model": {"uri": "hf://some/model", "maxModelLen": 2048},
        "task": {"path": "a.b:C", "groupSize": 8, "sampling": {"maxTokens": 1000}},
        "algorithm": {"steps": 1000, "groupsPerStep": 64, "optimizer": {"maxGradNorm": 1.0}},
        "staleness": {"policy": "areal", "eta": 4},
        "actors": {"replicas": 4, "gpusPerReplica": 1, "generator": {"maxRunningRequests": 256}},
        "trainers": {"replicas": 1, "processesPerNode": 8},
    },
}
"""1024 places for at most 2560 admitted sequences; a third of 12 GPUs generates; batches of 512."""

STEP: Mapping[str, float] = {
    "wait_seconds": 1.5,
    "train_seconds": 8.0,
    "step_seconds": STEP_S,
    "publish_seconds": 0.5,
    "pause_seconds": 0.05,
    "transfer_seconds": 0.4,
    "success_mean": 0.5,
    "completion_length_mean": 400.0,
    "ess": 0.97,
    "ess_truncated": 0.98,
    "lag_mean": 2.0,
    "lag_max": 4.0,
    "entropy": 0.5,
    "clip_fraction": 0.01,
    "grad_norm": 0.8,
    "packing_fill": 0.95,
    "packing_imbalance": 0.02,
    "num_sequences": 512.0,
    "num_trained_tokens": 200_000.0,
    "non_finite_micro_batches": 0.0,
    "weight_update_failures_total": 0.0,
    "skipped_steps_total": 0.0,
    "checkpoint_failures_total": 0.0,
    "memory_bytes": 8e9,
}


def job(changes: Mapping[str, Any] | None = None) -> Job:
    """The healthy job with sections of its spec changed. Example: {"staleness": {"eta": 1}}."""
    return parse_job({**JOB, "spec": _merged(JOB["spec"], changes or {})}, "by hand")


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    nested = {
        name: _merged(old[name], value)
        for name, value in new.items()
        if isinstance(value, dict) and name in old
    }
    return {**old, **new, **nested}


@dataclass(frozen=True)
class Change:
    """What differs from the healthy run, in the job and in what each role reports."""

    spec: Mapping[str, Any] = field(default_factory=dict)
    step: Mapping[str, float] = field(default_factory=dict)
    late: Mapping[str, float] = field(default_factory=dict)
    """The trainer's values in the second half."""
    preprocessor: Mapping[str, float] = field(default_factory=dict)
    actor: Mapping[str, float] = field(default_factory=dict)
    actor_0: Mapping[str, float] = field(default_factory=dict)
    """The first actor's values in the second half."""
    swing: float = 0.0
    """By how much requests_running of each actor goes up and down."""
    preempted: float = 0.0
    """Trajectories a step."""
    evaluator: Mapping[str, float] = field(default_factory=dict)
    up: Mapping[str, float] = field(default_factory=dict)
    num_steps: int = NUM_STEPS
    step_s: float = STEP_S
    status: str = "finished"
    logs: Mapping[str, str] = field(default_factory=dict)
    """Text by file."""


def run_facts(change: Change) -> RunFacts:
    with TemporaryDirectory() as folder:
        for name, text in change.logs.items():
            Path(folder, name).write_text(text)
        records = tuple(run_records(change))
        logs = Path(folder) if change.logs else None
        facts = RunFacts(job(change.spec), change.status, records, logs=logs)
        assert facts.lost_devices or not logs  # read once, while the folder is there
    return facts


def run_records(change: Change) -> list[Record]:
    """Four actors with 230 requests each; the reward grows from 0.2 to 0.6; memory stays."""
    records = [Record("up", "up", 0.0, -1, {"session_started": 1.0, "restarts_total": 0.0})]
    for step in range(1, NUM_STEPS + 1):
        time = step * change.step_s
        if step <= change.num_steps:
            records.append(_trainer(change, step, time))
        records.append(
            Record("preprocessor", "preprocessor-0", time, step, _preprocessor(change, step))
        )
        records.extend(_actors(change, step, time))
        if change.evaluator:
            records.append(Record("evaluator", "evaluator-0", time, -1, change.evaluator))
    records.append(
        Record("up", "up", NUM_STEPS * change.step_s, -1, {"restarts_total": 0.0, **change.up})
    )
    return records


def _trainer(change: Change, step: int, time: float) -> Record:
    reward = {"reward_mean": 0.2 + 0.4 * step / NUM_STEPS, "weight_updates_total": float(step)}
    late = change.late if step > NUM_STEPS // 2 else {}
    return Record("trainer", "trainer-0", time, step, {**STEP, **reward, **change.step, **late})


def _preprocessor(change: Change, step: int) -> dict[str, float]:
    usual = {
        "queue_groups{stage=ready}": 30.0,
        "groups_trained_total": 64.0 * step,
        "sequences_overlong_total": 0.0,
        "engine_kv_usage_ratio": 0.6,
        "engine_preemptions_total": change.preempted * step,
        "memory_bytes": 1e9,
    }
    return {**usual, **change.preprocessor}


def _actors(change: Change, step: int, time: float) -> Iterable[Record]:
    for number in range(4):
        values = {
            "requests_running": 230.0 + (change.swing if step % 2 else -change.swing),
            "tokens_generated_total": 51_000.0 * step,
            "samples_generated_total": 130.0 * step,
            "memory_bytes": 1e9,
            **change.actor,
        }
        if number == 0 and step > NUM_STEPS // 2:
            values |= change.actor_0
        yield Record("actor", f"actor-{number}", time + number / 1000, -1, values)
