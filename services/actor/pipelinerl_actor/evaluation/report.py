"""What the evaluator tells: its progress, and one record and a set of gauges for each result."""

import asyncio
import logging
from typing import TYPE_CHECKING

from pipelinerl_actor.evaluation.results import Result
from pipelinerl_common.metrics import EVALUATOR, Metrics, record_of
from pipelinerl_common.settings import EvaluationSettings, Job
from pipelinerl_common.stream import Stream
from pipelinerl_common.telemetry import memory_bytes

if TYPE_CHECKING:
    from pipelinerl_actor.evaluation.evaluate import Evaluation

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

    async def done(self, result: Result) -> None:
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
