"""One session of a run on this machine, from the first process to the last.

```
 nats-server -> prepare the model -> coordinator, services (plan) -> ... -> stop in order
                                             ^ the supervisor restarts what crashes
                                             ^ the autoscaler adds and removes actors, if the job
                                               asks for it
```
"""

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

from pipelinerl_cli.run_folder import RunFolder
from pipelinerl_cli.up.actors import Autoscaler, ChoiceFile
from pipelinerl_cli.up.display import Display, duration
from pipelinerl_cli.up.endings import RunEnding, ending_of, in_background
from pipelinerl_cli.up.live_metrics import Feed, RunView, SessionRecords
from pipelinerl_cli.up.nats_server import NatsServerProcess
from pipelinerl_cli.up.orphans import Guard
from pipelinerl_cli.up.placement import Ports
from pipelinerl_cli.up.process import LOG_PREFIX, Launcher
from pipelinerl_cli.up.services import Services, Session
from pipelinerl_cli.up.status_lines import (
    StallExplainer,
    Status,
    describe_phase,
    evaluation_progress,
)
from pipelinerl_cli.up.supervisor import (
    EXIT_DONE,
    EXIT_SETTINGS,
    LAST_LINES,
    ProcessFailure,
    Supervisor,
)
from pipelinerl_cli.up.targets import make_endpoints
from pipelinerl_common.runs.evaluations import evaluation_line
from pipelinerl_common.runs.records import MetricsWriter, Record
from pipelinerl_common.settings import EvaluationSettings, Job
from pipelinerl_control.plan import longest_evaluation_s, with_actors

log = logging.getLogger(__name__)

TICK_S = 0.25
PREPARE = "prepare"
PREPARE_GRACE_S = 5.0
PREPARE_MODULE = "pipelinerl_actor.prepare"


class Interrupt:
    """SIGINT, SIGTERM and SIGHUP of this process, as events: the first signal asks for a clean
    stop, the second for an immediate end.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()
        self.first: signal.Signals | None = None

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(each, self.receive, each)

    def receive(self, received: signal.Signals) -> None:
        if self.asked.is_set():
            self.at_once.set()
        self.first = self.first or received
        self.asked.set()


class LocalRun:
    """Runs `job` in `folder`, which the caller holds."""

    def __init__(self, job: Job, folder: RunFolder, display: Display, interrupt: Interrupt) -> None:
        self._job = job
        self._largest = with_actors(job, job.spec.most_actors)
        """With as many actors as there may ever be: they share the machine's threads, GPUs and
        ports.
        """
        self._folder = folder
        self._display = display
        self._interrupt = interrupt
        self._guard = Guard()
        self._view = RunView(job.spec.algorithm.steps, is_elastic=job.spec.autoscale.enabled)
        token = folder.make_token()
        self._autoscaler = Autoscaler(
            job.spec, ChoiceFile(folder.root / "autoscale.json"), display.note
        )
        self._writer = MetricsWriter.open(
            folder.root / "metrics.jsonl", time.time(), self._view.take
        )
        self._records = SessionRecords(self._writer, self._view)
        self._launcher = Launcher(self._largest, folder, self._guard)
        self._session = Session(job, folder, token, self._launcher, self._records, display.note)
        self._services: Services | None = None
        self._status: Callable[[], Status] = lambda: Status("starting")

    async def run(self) -> RunEnding:
        """Runs until the run is finished or fails, or a signal arrives. Nothing is left running."""
        self._records.begin()
        try:
            async with AsyncExitStack() as stack:
                return await self._run(stack)
        finally:
            self._records.end()

    async def _run(self, stack: AsyncExitStack) -> RunEnding:
        stack.enter_context(self._guard)
        ports = stack.enter_context(Ports())
        in_background(stack, self._refresh())
        nats = NatsServerProcess(
            self._folder.stream_store,
            ports.reserve(),
            self._session.token,
            self._records.count_restart,
        )
        serving = in_background(stack, nats.run())
        self._status = lambda: Status("starting nats-server")
        if (ending := await self._reach(nats.ready.wait(), serving)) is not None:
            return ending
        if (ending := await self._prepare(serving)) is not None:
            return ending
        feed = Feed(self._job, nats.url, self._session.token, self._writer, self._take)
        in_background(stack, feed.run())
        endpoints = make_endpoints(self._largest, self._folder, ports, nats.url)
        services = await Services.open(stack, self._session, endpoints, self._autoscaler)
        ending = await self._train(stack, services, serving)
        await self._stop(services, ending, services.supervisor, services.evaluation)
        await feed.settle(quiet_s=0.5, timeout_s=3.0)
        return ending

    async def _prepare(self, serving: asyncio.Task[ProcessFailure]) -> RunEnding | None:
        """Prepares the model and tries the task; None when both succeeded."""
        files = ("--job", str(self._folder.job_file), "--output", str(self._folder.root))
        argv = ("python", "-m", PREPARE_MODULE, *files, "--check-task", "--check-sets")
        process = await self._launcher.start(PREPARE, argv)

        def status() -> Status:
            return Status(
                "preparing the model", LOG_PREFIX.sub("", " ".join(process.last_lines(1)))
            )

        self._status = status
        try:
            ending = await self._reach(process.wait(), serving)
        finally:
            # Its end must be received before the event loop closes.
            await process.stop(PREPARE_GRACE_S)
        if ending is not None or process.exit_status == EXIT_DONE:
            return ending
        is_bad = process.exit_status == EXIT_SETTINGS
        reason, lines = f"ended with status {process.exit_status}", process.last_lines(LAST_LINES)
        failure = ProcessFailure(PREPARE, reason, lines, bad_input=is_bad)
        return RunEnding("failed", failure, never_began=is_bad)

    async def _train(
        self, stack: AsyncExitStack, services: Services, serving: asyncio.Task[ProcessFailure]
    ) -> RunEnding:
        """Starts the services and waits for the end of training, and for the last evaluation."""
        training, evaluating, helpers = services.start(stack)
        self._services = services
        self._status = lambda: describe_phase(
            services.fleet.generator_urls(), services.coordinator, self._view
        )
        ending = await self._reach(training, serving, *helpers) or ending_of(training)
        services.release()
        evaluation = self._job.spec.evaluation
        if ending.status == "finished" and evaluation is not None:
            # Training makes room first: the last evaluation gets the whole machine.
            await self._stop(services, ending, services.supervisor)
            await self._wait_for_evaluation(evaluation, evaluating, serving)
        return ending

    async def _wait_for_evaluation(
        self,
        settings: EvaluationSettings,
        evaluating: asyncio.Task[None],
        serving: asyncio.Task[ProcessFailure],
    ) -> None:
        """Waits until the last step is evaluated, within a limit. The run is finished with or
        without a result.
        """
        step, limit_s = self._job.spec.algorithm.steps, longest_evaluation_s(settings)
        sets = [each.name for each in settings.sets]
        self._status = lambda: Status(
            f"evaluating step {step}", evaluation_progress(self._view, sets)
        )
        if not evaluating.done():
            self._display.note(
                f"training is finished; evaluating step {step}, {duration(limit_s)} at most"
            )
        try:
            async with asyncio.timeout(limit_s):
                if await self._reach(evaluating, serving) is not None:
                    log.warning("step %d is not evaluated; the same command does it", step)
        except TimeoutError:
            log.warning(
                "step %d is not evaluated after %g s; see logs/evaluator-0.log", step, limit_s
            )

    async def _stop(self, services: Services, ending: RunEnding, *supervisors: Supervisor) -> None:
        def status() -> Status:
            names = [name for each in supervisors for name in each.running]
            return Status("stopping", ", ".join(names) or "reading the last metrics")

        self._status = status
        is_finished, at_once = ending.status == "finished", self._interrupt.at_once
        await services.stop(*supervisors, is_finished=is_finished, at_once=at_once)

    async def _reach(
        self, goal: Coroutine[Any, Any, Any] | asyncio.Task[Any], *needed: asyncio.Task[Any]
    ) -> RunEnding | None:
        """Waits for `goal`. Returns None when it is reached, an ending when a signal arrives or one
        of the `needed` tasks ends before.
        """
        task = asyncio.ensure_future(goal)
        asked = asyncio.create_task(self._interrupt.asked.wait())
        try:
            done, _ = await asyncio.wait(
                {task, asked, *needed}, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            asked.cancel()
        if asked in done:
            if task is not goal:  # the caller's own task runs until the stack unwinds
                task.cancel()
            return RunEnding("interrupted")
        if task in done:
            return None
        return ending_of(next(each for each in needed if each in done))

    def _take(self, record: Record) -> None:
        if self._view.take(record):
            self._display.stepped(self._view)
        if line := self._view.rollback.line or evaluation_line(record):
            self._display.note(line)

    async def _refresh(self) -> None:
        """Updates the display and the recorded number of actors until cancelled."""
        stall = StallExplainer(self._job.spec.algorithm.groups_per_step)
        view = self._view
        while True:
            view.phase, view.detail = self._status()
            services = self._services
            self._records.take_scale(services.scale() if services else self._autoscaler.scale(0))
            self._display.update(view)
            if view.step < view.steps_total and (line := stall.look(view, time.monotonic())):
                self._display.note(line)
            await asyncio.sleep(TICK_S)
