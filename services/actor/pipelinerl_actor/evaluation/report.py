"""What an evaluation reports: a file, a record, and gauges.

`evaluations/step-40.json` holds what was found at a step; a step that has such a file is not
evaluated again. The record and the gauges carry the same numbers, and the progress meanwhile.
"""

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelinerl_common.files import write_whole
from pipelinerl_common.metrics import EVALUATOR, Metrics, record_of
from pipelinerl_common.settings import EvaluationSettings, Job
from pipelinerl_common.stream import Stream
from pipelinerl_common.telemetry import memory_bytes

if TYPE_CHECKING:
    from pipelinerl_actor.evaluation.evaluate import Evaluation

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
PERIOD_S = 1.0
TRIES = 60
"""Attempts, one each period, to send the record of a result while the stream's server is
unreachable; the file has the result all the same.
"""


@dataclass(frozen=True)
class EvaluationResult:
    """The result of one step's evaluation.

    Example: EvaluationResult(40, {"held-out": Evaluation(...)}, {"hard": "TimeoutError"}, 12.5).
    """

    step: int
    sets: Mapping[str, "Evaluation"] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    """Why the other sets have no result."""
    seconds: float = 0.0
    overtaken: tuple[int, ...] = ()
    """Steps that were due before and were not evaluated."""

    def document(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "step": self.step,
            "seconds": round(self.seconds, 3),
            "sets": {name: asdict(each) for name, each in self.sets.items()},
            "failed": dict(self.failed),
            "overtaken": list(self.overtaken),
        }

    def __str__(self) -> str:
        """Example: "step 40: held-out pass@1 0.812 (0.766 to 0.853), reward 0.812; hard failed:
        ...".
        """
        parts = [f"{name} {_numbers(each)}" for name, each in self.sets.items()]
        parts += [f"{name} failed: {why}" for name, why in self.failed.items()]
        return f"step {self.step}: {'; '.join(parts)}"


def _numbers(evaluation: "Evaluation") -> str:
    passes = [
        f"pass@{k} {each.mean:.3f} ({each.low:.3f} to {each.high:.3f})"
        for k, each in evaluation.pass_at.items()
    ]
    return ", ".join([*passes, f"reward {evaluation.reward.mean:.3f}"])


def results_folder(root: Path) -> Path:
    """The folder of the results of the run in `root`."""
    return root / "evaluations"


def result_file(root: Path, step: int) -> Path:
    return results_folder(root) / f"step-{step}.json"


def evaluated_steps(root: Path) -> list[int]:
    """Steps of the run in `root` that have a result, ascending."""
    names = [path.stem.removeprefix("step-") for path in results_folder(root).glob("step-*.json")]
    return sorted(int(name) for name in names if name.isdecimal())


def write_result(root: Path, result: EvaluationResult) -> None:
    """Writes the whole file or nothing, durably. Raises OSError."""
    target = result_file(root, result.step)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, json.dumps(result.document(), indent=2) + "\n")


class EvaluationReport:
    """The evaluator's metrics, and the records of them that it publishes."""

    def __init__(
        self, job: Job, settings: EvaluationSettings, instance: str, stream: Stream
    ) -> None:
        self.metrics = metrics = Metrics(EVALUATOR, job.name)
        self._settings = settings
        self._instance = instance
        self._stream = stream
        self._skipped = metrics.counter("evaluations_skipped_total")
        self._ended = metrics.counter("evaluations_total")
        self._failures = metrics.counter("evaluation_prompts_failed_total")
        self._running_step = metrics.gauge("evaluation_running_step")
        self._running_step.set(-1.0)
        self._prompts_done = metrics.gauge("evaluation_prompts_done")
        metrics.gauge("memory_bytes").read(memory_bytes)
        for each in settings.sets:
            metrics.gauge("evaluation_prompts_planned").set(each.num_prompts, set=each.name)
        self._num_done: dict[str, int] = {}

    def begin(self, step: int) -> None:
        self._running_step.set(step)
        self._num_done.clear()
        for each in self._settings.sets:
            self._prompts_done.set(0, set=each.name)

    def prompt_done(self, name: str) -> None:
        """Counts a prompt of the set `name`."""
        self._num_done[name] = self._num_done.get(name, 0) + 1
        self._prompts_done.set(self._num_done[name], set=name)

    def stopped(self) -> None:
        """The running evaluation has ended, with a result or without."""
        self._running_step.set(-1.0)

    def skipped(self, count: int, reason: str) -> None:
        self._skipped.inc(count, reason=reason)

    async def done(self, result: EvaluationResult) -> None:
        """Sets the gauges to the result and publishes them as the record of its step."""
        self.metrics.gauge("evaluated_step").set(result.step)
        self.metrics.gauge("evaluation_seconds").set(result.seconds)
        self.metrics.gauge("evaluation_sets_failed").set(len(result.failed))
        self._ended.inc(outcome="failed" if result.failed else "done")
        for each in self._settings.sets:
            self._show(each.name, each.pass_at, result.sets.get(each.name))
        for _ in range(TRIES):
            if await self._publish(result.step):
                return
            await asyncio.sleep(PERIOD_S)
        log.warning(
            "step=%d the stream's server is unreachable: its record is lost, its file is not",
            result.step,
        )

    def _show(self, name: str, ks: list[int], evaluation: "Evaluation | None") -> None:
        """Sets the gauges of one set. Without a result they have no values, rather than those of an
        older step.
        """

        def show(gauge: str, value: float | None, **labels: str) -> None:
            self.metrics.gauge(f"evaluation_{gauge}").set(value, set=name, **labels)

        for k in ks:
            found = evaluation.pass_at[k] if evaluation else None
            show("pass_ratio", found.mean if found else None, k=str(k))
            show("pass_ratio_low", found.low if found else None, k=str(k))
            show("pass_ratio_high", found.high if found else None, k=str(k))
        show("reward_mean", evaluation.reward.mean if evaluation else None)
        show("reward_low", evaluation.reward.low if evaluation else None)
        show("reward_high", evaluation.reward.high if evaluation else None)
        show("tokens_mean", evaluation.tokens_per_answer if evaluation else None)
        show("truncated_ratio", evaluation.truncated_share if evaluation else None)
        show("prompts", evaluation.num_prompts if evaluation else None)
        for reason, count in (evaluation.failures if evaluation else {}).items():
            self._failures.inc(count, set=name, reason=reason)

    async def run(self) -> None:
        """Consumes the gauges, produces a record of the progress about every second, waits for its
        period only; runs until cancelled.
        """
        while True:
            await asyncio.sleep(PERIOD_S)
            await self._publish(-1)

    async def _publish(self, step: int) -> bool:
        """Whether the record was sent."""
        return await self._stream.publish_metrics(record_of(self.metrics, self._instance, step))
