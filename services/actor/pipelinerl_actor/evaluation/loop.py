"""The loop of the evaluator.

 checkpoints --choose--> pin --a generator on these weights--> every set --> record, and
      ^                                                               evaluations/step-N.json
      +------------------------------ look again ---------------------------+

The file is written last: after a crash before it the step is evaluated again, after a crash behind
it not.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path

from pipelinerl_actor.evaluation.checkpoints import (
    START,
    CheckpointRemoved,
    DueCheckpoint,
    choose,
    is_over,
    pinned,
)
from pipelinerl_actor.evaluation.evaluate import Evaluation, make_sets, seed_of, task_of
from pipelinerl_actor.evaluation.generator import evaluator, generator
from pipelinerl_actor.evaluation.report import (
    EvaluationReport,
    EvaluationResult,
    evaluated_steps,
    results_folder,
    write_result,
)
from pipelinerl_actor.rollout.start import GeneratorPool
from pipelinerl_actor.task import Task
from pipelinerl_common import stream
from pipelinerl_common.checkpoints import MODEL, complete_checkpoints
from pipelinerl_common.errors import FatalError, PipelineRLError, SettingsError, Unavailable
from pipelinerl_common.metrics import serve_metrics
from pipelinerl_common.service import Wiring, cancel_all, run_until_first
from pipelinerl_common.settings import EvaluationSetSettings, EvaluationSettings, JobSpec, load_job

log = logging.getLogger(__name__)

LOOK_S = 2.0


class EvaluationLoop:
    """Evaluates the due checkpoints of one run, whose folder is `wiring.output`."""

    def __init__(
        self,
        spec: JobSpec,
        settings: EvaluationSettings,
        wiring: Wiring,
        report: EvaluationReport,
        tasks: Mapping[str, Task],
    ) -> None:
        """`tasks` has the task of every set, by the set's name."""
        self._spec = spec
        self._settings = settings
        self._wiring = wiring
        self._report = report
        self._tasks = tasks
        self._root = wiring.output
        self._unwritten: list[int] = []
        """Steps whose result could not be written."""

    async def run(self) -> EvaluationResult | None:
        """Consumes checkpoints, produces results, waits for checkpoints and generators; ends when
        the last step is evaluated, successfully or not.

        Returns its result, None when an earlier evaluator had it.
        """
        last_step = self._spec.algorithm.steps
        result: EvaluationResult | None = None
        while True:
            evaluated = await asyncio.to_thread(evaluated_steps, self._root)
            evaluated += self._unwritten
            if is_over(last_step, evaluated):
                return result
            newest = max(evaluated, default=START)
            there = complete_checkpoints(self._root, newest)
            # In a thread, which reads folders until it has found the newest due checkpoint.
            due = await asyncio.to_thread(choose, self._settings, last_step, there, evaluated)
            if due is None:
                await asyncio.sleep(LOOK_S)
                continue
            result = await self._evaluate(due) or result

    async def _evaluate(self, due: DueCheckpoint) -> EvaluationResult | None:
        """None when the checkpoint was removed before it could be pinned."""
        began = time.monotonic()
        self._report.begin(due.step)
        log.info("step=%d evaluation begins", due.step)
        with ExitStack() as stack:
            stack.callback(self._report.stopped)
            try:
                model = await asyncio.to_thread(stack.enter_context, self._weights(due.step))
            except CheckpointRemoved as error:
                log.warning("step=%d skipped, reason=removed: %s", due.step, error)
                self._report.skipped(1, "removed")
                return None
            sets, failed = await self._measure(model, due.step)
        if due.overtaken:
            skipped = ", ".join(map(str, due.overtaken))
            log.warning("step=%d evaluated; skipped, reason=overtaken: %s", due.step, skipped)
            self._report.skipped(len(due.overtaken), "overtaken")
        result = EvaluationResult(due.step, sets, failed, time.monotonic() - began, due.overtaken)
        log.log(logging.WARNING if failed else logging.INFO, "evaluated %s", result)
        await self._report.done(result)
        try:
            await asyncio.to_thread(write_result, self._root, result)
        except OSError as error:
            # A full disk must not make the evaluator measure the same step again and again.
            log.error("alert=write_failed the result of step %d: %s", due.step, error)
            self._unwritten.append(due.step)
        return result

    def _weights(self, step: int) -> AbstractContextManager[Path]:
        """The initial model needs no pin, since it is never removed."""
        if step == START:
            return nullcontext(self._root / MODEL)
        return pinned(self._root, step, results_folder(self._root))

    async def _measure(
        self, model: Path, step: int
    ) -> tuple[dict[str, Evaluation], dict[str, str]]:
        """The results by set, and why the other sets have none."""
        sets: dict[str, Evaluation] = {}
        failed: dict[str, str] = {}
        limit_s = self._settings.timeout_seconds
        why = ""
        engine = self._settings.generator or self._spec.actors.generator
        max_running, token = engine.max_running_requests, self._wiring.token
        async with generator(self._wiring, model, step) as own:
            try:
                async with asyncio.timeout(limit_s):
                    await own.until_ready()
                    pool = GeneratorPool([own.url], model, max_running, token)
                    # A generator that ends would leave its requests waiting for another one.
                    await run_until_first(self._measure_sets(pool, step, sets, failed), own.ended())
            except TimeoutError:
                why = f"not done within evaluation.timeoutSeconds={limit_s:g}"
            except Unavailable as error:
                why = str(error)
        missing = {each.name for each in self._settings.sets} - sets.keys() - failed.keys()
        return sets, failed | dict.fromkeys(missing, why)

    async def _measure_sets(
        self, pool: GeneratorPool, step: int, sets: dict[str, Evaluation], failed: dict[str, str]
    ) -> None:
        for each in self._settings.sets:
            try:
                sets[each.name] = await self._measure_set(each, pool, step)
            except PipelineRLError as error:  # one set's fault must not cost the others' results
                failed[each.name] = f"{type(error).__name__}: {error}"

    async def _measure_set(
        self, each: EvaluationSetSettings, pool: GeneratorPool, step: int
    ) -> Evaluation:
        """Raises FatalError when it has no result, or one of other weights."""
        seed = seed_of(self._spec)
        counting = partial(self._report.prompt_done, each.name)
        async with evaluator(
            self._tasks[each.name], task_of(self._spec, each), seed, pool, counting
        ) as evaluating:
            evaluation = await evaluating.run(range(each.num_prompts), sorted(each.pass_at), seed)
        if evaluation.policy_version != step:
            raise FatalError(
                f"the answers come from version {evaluation.policy_version}, not from {step}"
            )
        return evaluation


async def run_evaluator(wiring: Wiring, stop: asyncio.Event, last_result: Path | None) -> None:
    """Runs until the run's last step is evaluated, or `stop` is set, which ends a running
    evaluation without a result.

    The last step's result is written to `last_result` as text. Raises SettingsError for a set or
    wiring that cannot work.
    """
    job = load_job(wiring.job_file)
    settings = job.spec.evaluation
    if settings is None:
        raise SettingsError(f"--name {wiring.name}: the job has no spec.evaluation")
    tasks = make_sets(job)
    async with stream.connect(
        wiring.nats_url,
        job.name,
        job.spec.stream,
        name=wiring.name,
        namespace=job.metadata.namespace,
        login=stream.Login.of(wiring),
    ) as connection:
        report = EvaluationReport(job, settings, wiring.name, connection)
        loop = EvaluationLoop(job.spec, settings, wiring, report, tasks)
        async with serve_metrics(wiring.metrics_listen, report.metrics.exposition):
            working = asyncio.create_task(run_until_first(loop.run(), report.run()))
            stopping = asyncio.create_task(stop.wait())
            try:
                await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
                is_over = working.done()
            finally:
                await cancel_all([working, stopping])
            if is_over:
                _write_last(working.result(), last_result)


def _write_last(result: EvaluationResult | None, file: Path | None) -> None:
    log.info("the last step is evaluated")
    if file is None or result is None:
        return
    try:
        file.write_text(str(result), encoding="utf-8")
    except OSError as error:
        # The file is for display only: the process has done its work all the same.
        log.warning("the last result is not written: %s", error)
