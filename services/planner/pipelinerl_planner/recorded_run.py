"""A live run's folder as the simulator needs it: its policy, its lengths, the costs of its parts,
and its results.

events.jsonl    the policy's events and decisions, with times; lengths of groups; sums over the
                engines' decode steps
metrics.jsonl   the pauses of decoding for new weights
job.yaml        the number of sequences that the actors keep on the generators
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelinerl_common.settings import Job, load_job
from pipelinerl_common.text import did_you_mean_folder
from pipelinerl_staleness.policy import PolicySettings
from pipelinerl_staleness.recording import START
from pipelinerl_staleness.registry import parse_policy_settings

EVENTS, METRICS, JOB = "events.jsonl", "metrics.jsonl", "job.yaml"
_LEAST_STEPS = 4
_LEAST_LOADS = 5


@dataclass(frozen=True, slots=True)
class LoadSums:
    """One `load` record, written by the preprocessor's EngineLoads: sums over all generators from
    the start of the run.
    """

    at: float
    num_generators: int
    kv_tokens: int
    block_tokens: int
    num_steps: float
    step_seconds: float
    step_tokens: float
    prefill_tokens: float
    running_seconds: float
    kv_usage_seconds: float
    requested_seconds: float
    """Sequences that the actors wait for, integrated over time."""
    num_answered: float

    @classmethod
    def of(cls, at: float, values: list[Any]) -> "LoadSums":
        generators, kv_tokens, block, _, _, _, _, *sums = values
        return cls(at, int(generators), int(kv_tokens), int(block), *sums)


@dataclass(slots=True)
class TrainedStep:
    """The times at which the trainer first requested the batch of a step, had all of it, and
    committed it; its sampled tokens.
    """

    asked: float = 0.0
    taken: float = 0.0
    done: float = 0.0
    tokens: int = 0
    trained_s: float = 0.0
    """Training alone, as the trainer reports it: for streaming policies, whose batches arrive while
    they are trained.
    """


@dataclass(slots=True)
class RecordedRun:
    """The records of a run; times are in seconds since the epoch."""

    job: Job
    settings: PolicySettings
    groups_per_step: int
    policy: str
    began: float = 0.0
    """Time at which the first version was served."""
    admitted: list[str] = field(default_factory=list)
    """Groups in dispatch order."""
    lengths: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """Prompt and sampled tokens of finished groups."""
    ways: list[float] = field(default_factory=list)
    """Seconds of each group from its actor to the preprocessor."""
    steps: dict[int, TrainedStep] = field(default_factory=dict)
    published: dict[int, float] = field(default_factory=dict)
    loads: list[LoadSums] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    num_lost: int = 0
    """Groups that failed or were filtered, which the simulation does not model."""

    @property
    def num_steps(self) -> int:
        return len(self.steps)

    @property
    def ended(self) -> float:
        return self.steps[max(self.steps)].done

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def settled_loads(self) -> list[LoadSums]:
        """Returns the loads between the start and the end of training."""
        return [load for load in self.loads if self.began <= load.at <= self.ended]

    @property
    def mean_running(self) -> float:
        first, last = self.settled_loads()[0], self.settled_loads()[-1]
        return (last.running_seconds - first.running_seconds) / (last.at - first.at)

    @property
    def mean_kv_usage(self) -> float:
        first, last = self.settled_loads()[0], self.settled_loads()[-1]
        return (
            (last.kv_usage_seconds - first.kv_usage_seconds)
            / (last.at - first.at)
            / last.num_generators
        )


def read_recorded_run(folder: Path) -> RecordedRun:
    """Reads a folder of `pipelinerl up`. Raises ValueError that names what it lacks and the remedy,
    and SettingsError for its job file.
    """
    for name in (EVENTS, METRICS, JOB):
        if not (folder / name).is_file():
            hint = did_you_mean_folder(folder)
            raise ValueError(
                f"{folder} has no {name}: give the --output folder of a `pipelinerl up`{hint}"
            )
    run: RecordedRun | None = None
    for where, line in _whole_lines(folder / EVENTS):
        with _named(where):
            at, method, arguments, answer = json.loads(line)
            if method == START:
                if run is not None and run.admitted:
                    raise ValueError(
                        "the preprocessor was restarted in this run; give one that ran through"
                    )
                name, parameters, groups_per_step = arguments
                run = RecordedRun(
                    load_job(folder / JOB),
                    parse_policy_settings(name, parameters),
                    groups_per_step,
                    name,
                )
            elif run is not None:
                _record_event(run, float(at), method, arguments, answer)
    if run is None:
        raise ValueError(
            f"{folder / EVENTS}: it has no start of a policy; it is not the event log of a "
            "preprocessor"
        )
    run.steps = {step: times for step, times in run.steps.items() if times.done}
    _read_metrics(run, folder / METRICS)
    _check(run, folder)
    return run


def _whole_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yields lines with their places, without a last one that is not completely written."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield f"{path}:{number}", line


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Adds the place to every error."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"{where}: not what a run writes: {error!r}") from error


def _record_event(
    run: RecordedRun, at: float, method: str, arguments: list[Any], answer: Any
) -> None:
    if method == "admitted":
        run.admitted.append(arguments[0])
    elif method == "lengths":
        group, finished_at, prompt, sampled = arguments
        run.lengths[group] = (prompt, tuple(max(1, tokens) for tokens in sampled))
        run.ways.append(max(0.0, at - finished_at))
    elif method == "load":
        run.loads.append(LoadSums.of(at, arguments))
    elif method in ("take", "take_next"):
        step = run.steps.setdefault(arguments[0], TrainedStep(asked=at))
        if answer[0]:
            step.taken = at
            step.tokens += sum(sum(run.lengths[group][1]) for group in answer[0])
    elif method == "step_done":
        run.steps[arguments[0]].done = at
    elif method == "published":
        run.published.setdefault(arguments[0], at)
        run.began = run.began or at
    elif method == "lost":
        run.num_lost += 1
    elif method == "recover" and run.admitted:
        raise ValueError(
            "the trainer returned to a checkpoint in this run; give one that ran through"
        )


def _read_metrics(run: RecordedRun, path: Path) -> None:
    """Reads the trainer's record of each step, and the pause of every update once."""
    updates = 0.0
    for where, line in _whole_lines(path):
        with _named(where):
            record = json.loads(line)
            values = record["values"]
            if record["role"] != "trainer":
                continue
            if record["step"] - 1 in run.steps:
                run.steps[record["step"] - 1].trained_s = float(values.get("train_seconds", 0.0))
            if values.get("weight_updates_total", 0.0) > updates and "pause_seconds" in values:
                updates = values["weight_updates_total"]
                run.pauses.append(float(values["pause_seconds"]))


def _check(run: RecordedRun, folder: Path) -> None:
    if run.num_steps < _LEAST_STEPS:
        raise ValueError(
            f"{folder / EVENTS}: {run.num_steps} steps were trained; costs are fitted from "
            f"{_LEAST_STEPS} on"
        )
    if len(run.settled_loads()) < _LEAST_LOADS or not run.settled_loads()[-1].num_steps:
        raise ValueError(
            f"{folder / EVENTS}: the engines reported their load {len(run.settled_loads())} times "
            "while it trained, "
            f"{_LEAST_LOADS} are needed: let it run longer"
        )
    if not run.settled_loads()[-1].kv_tokens:
        raise ValueError(
            f"{folder}: its engine has no KV blocks; record a run with actors.generator.engine: "
            "vllm"
        )
    if not run.pauses:
        raise ValueError(
            f"{folder / METRICS}: it has no weight update; record a run that publishes"
        )
