"""`evaluations/step-40.json`: what one evaluation found. A step that has such a file is not
evaluated again.

What the evaluator tells: its progress, and one record and a set of gauges for each result.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelinerl_common.files import write_whole

if TYPE_CHECKING:
    from pipelinerl_actor.evaluation.evaluate import Evaluation
import asyncio
import logging
from typing import TYPE_CHECKING

from pipelinerl_common.metrics import EVALUATOR, Metrics, record_of
from pipelinerl_common.settings import EvaluationSettings, Job
from pipelinerl_common.stream import Stream
from pipelinerl_common.telemetry import memory_bytes

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class EvaluationResult:
    """Of one step. Example: Result(40, {"held-out": Evaluation(...)}, {"hard": "TimeoutError:
    ..."}, 12.5, (20,)).
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
    """Of the run in `root`."""
    return root / "evaluations"


def result_file(root: Path, step: int) -> Path:
    return results_folder(root) / f"step-{step}.json"


def evaluated_steps(root: Path) -> list[int]:
    """Steps of the run in `root` that have a result, ascending."""
    names = [path.stem.removeprefix("step-") for path in results_folder(root).glob("step-*.json")]
    return sorted(int(name) for name in names if name.isdecimal())


def write_result(root: Path, result: EvaluationResult) -> None:
    """Whole or not at all, and durable. Raises OSError."""
    target = result_file(root, result.step)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, json.dumps(result.document(), indent=2) + "\n")


log = logging.getLogger(__name__)

PERIOD_S = 1.0
TRIES = 60
"""How often, once a period, the record of a result is sent while the stream's server is away; its
file has it all the same.
"""


class EvaluationReport:
    def __init__(
        self, job: Job, settings: EvaluationSettings, instance: str, stream: Stream
    ) -> None:
        self.metrics = metrics = Metrics(EVALUATOR, job.name)
        self._settings = settings
        self._instance = instance
        self._stream = stream
        self._pass_at = {
            edge: metrics.gauge(f"evaluation_pass_ratio{edge}") for edge in ("", "_low", "_high")
        }
        self._reward = {
            edge: metrics.gauge(f"evaluation_reward{edge}") for edge in ("_mean", "_low", "_high")
        }
        self._of_set = {
            name: metrics.gauge(f"evaluation_{name}")
            for name in ("tokens_mean", "truncated_ratio", "prompts", "prompts_done")
        }
        self._skipped = metrics.counter("evaluations_skipped_total")
        self._ended = metrics.counter("evaluations_total")
        self._failures = metrics.counter("evaluation_prompts_failed_total")
        metrics.gauge("evaluation_running_step").set(-1.0)
        metrics.gauge("memory_bytes").read(memory_bytes)
        for each in settings.sets:
            metrics.gauge("evaluation_prompts_planned").set(each.num_prompts, set=each.name)
        self._num_done: dict[str, int] = {}

    def begin(self, step: int) -> None:
        self.metrics.gauge("evaluation_running_step").set(step)
        self._num_done.clear()
        for each in self._settings.sets:
            self._of_set["prompts_done"].set(0, set=each.name)

    def prompt_done(self, name: str) -> None:
        """One prompt more of the set `name`."""
        self._num_done[name] = self._num_done.get(name, 0) + 1
        self._of_set["prompts_done"].set(self._num_done[name], set=name)

    def stopped(self) -> None:
        """The running evaluation has ended, with a result or without."""
        self.metrics.gauge("evaluation_running_step").set(-1.0)

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
        await self._tell(result.step)

    def _show(self, name: str, ks: list[int], evaluation: "Evaluation | None") -> None:
        """A set without a result has no values, rather than those of an older step."""
        for k in ks:
            found = None if evaluation is None else evaluation.pass_at[k]
            self._pass_at[""].set(None if found is None else found.mean, set=name, k=str(k))
            self._pass_at["_low"].set(None if found is None else found.low, set=name, k=str(k))
            self._pass_at["_high"].set(None if found is None else found.high, set=name, k=str(k))
        reward = None if evaluation is None else evaluation.reward
        self._reward["_mean"].set(None if reward is None else reward.mean, set=name)
        self._reward["_low"].set(None if reward is None else reward.low, set=name)
        self._reward["_high"].set(None if reward is None else reward.high, set=name)
        self._of_set["tokens_mean"].set(
            None if evaluation is None else evaluation.tokens_per_answer, set=name
        )
        self._of_set["truncated_ratio"].set(
            None if evaluation is None else evaluation.truncated_share, set=name
        )
        self._of_set["prompts"].set(
            None if evaluation is None else evaluation.num_prompts, set=name
        )
        for reason, count in (evaluation.failures if evaluation is not None else {}).items():
            self._failures.inc(count, set=name, reason=reason)

    async def _tell(self, step: int) -> None:
        for _ in range(TRIES):
            if await self._publish(step):
                return
            await asyncio.sleep(PERIOD_S)
        log.warning(
            "step=%d the stream's server is away: its record is lost, its file is not", step
        )

    async def run(self) -> None:
        """Publishes the progress about every second, produces nothing else, never ends."""
        while True:
            await asyncio.sleep(PERIOD_S)
            await self._publish(-1)

    async def _publish(self, step: int) -> bool:
        """Whether the record was sent."""
        return await self._stream.publish_metrics(record_of(self.metrics, self._instance, step))
