"""One session of a run on this machine, from the first process to the last.

```
 nats-server -> prepare the model -> coordinator, services (plan) -> ... -> stop in order -> summary, report
                                            ^ supervisor restarts what crashes
                                            ^ autoscaler lets actors come and go, where the job says so
```
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any

from pipelinerl_cli.runs.evaluations import evaluation_line
from pipelinerl_cli.runs.records import MetricsWriter, Record
from pipelinerl_cli.up import targets
from pipelinerl_cli.up.actors import ACTOR_GRACE_S, Autoscaler, ChoiceFile, Fleet
from pipelinerl_cli.up.checks import environment
from pipelinerl_cli.up.display import Display, duration
from pipelinerl_cli.up.folder import RunFolder, newest_checkpoint
from pipelinerl_cli.up.live_metrics import Feed, RunView, SessionRecords
from pipelinerl_cli.up.nats_server import NatsServerProcess
from pipelinerl_cli.up.orphans import Guard
from pipelinerl_cli.up.process import LOG_PREFIX, Interrupt, LocalProcess, Ports
from pipelinerl_cli.up.status_lines import Patience, Silence, describe_phase, progress
from pipelinerl_cli.up.supervisor import (
    EXIT_DONE,
    EXIT_SETTINGS,
    LAST_LINES,
    ProcessFailure,
    RunEnding,
    Supervisor,
    ending_of,
    in_background,
)
from pipelinerl_cli.up.targets import own_metrics, targets_file
from pipelinerl_common.files import write_whole
from pipelinerl_common.metrics import COORDINATOR, Metrics, serve_metrics
from pipelinerl_common.settings import EvaluationSettings, Job
from pipelinerl_common.tracing import open_tracer
from pipelinerl_control.coordinator import Coordinator
from pipelinerl_control.metrics import ActorScale, export_coordinator
from pipelinerl_control.plan import (
    Endpoints,
    PlannedProcess,
    Role,
    longest_evaluation_s,
    process_names,
    with_actors,
)
from pipelinerl_control.service import serve_coordinator

log = logging.getLogger(__name__)

TICK_S = 0.25
STOP_GRACE_S = 15.0
GENERATOR_GRACE_S = 5.0
"""Actors have ended by then: nothing of worth runs in a generator any more."""
EVALUATOR_GRACE_S = 35.0
"""Its own generator gets 30 s of it."""
PREPARE = "prepare"
PREPARE_GRACE_S = 5.0
PREPARE_MODULE = "pipelinerl_actor.prepare"


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
        self._view = RunView(job.spec.algorithm.steps, is_elastic=job.spec.autoscale.enabled)
        self._describe: Callable[[], tuple[str, str]] = lambda: ("starting", "")
        self._guard = Guard()
        self._token = folder.make_token()
        self._autoscaler = Autoscaler(job.spec, ChoiceFile(folder.choice_file), display.note)
        self._scale: Callable[[], ActorScale] = lambda: self._autoscaler.scale(0)
        self._writer = MetricsWriter.open(folder.metrics_file, time.time(), self._view.take)
        self._records = SessionRecords(self._writer, self._view)

    async def run(self) -> RunEnding:
        """To the end of the run, a failure, or a signal. Nothing is left running."""
        self._records.begin()
        try:
            async with AsyncExitStack() as stack:
                return await self._session(stack)
        finally:
            self._records.end()

    async def _session(self, stack: AsyncExitStack) -> RunEnding:
        stack.enter_context(self._guard)
        ports = stack.enter_context(Ports())
        in_background(stack, self._refresh())
        server = NatsServerProcess(
            self._folder.stream_store, ports.reserve(), self._token, self._records.count_restart
        )
        serving = in_background(stack, server.run())
        self._describe = lambda: ("starting nats-server", "")
        if (ending := await self._until(server.ready.wait(), serving)) is not None:
            return ending
        if (ending := await self._prepare(serving)) is not None:
            return ending
        feed = Feed(self._job, server.url, self._token, self._writer, self._take)
        in_background(stack, feed.run())
        endpoints = self._endpoints(ports, server.url)
        fleet = Fleet(
            self._largest,
            endpoints,
            self._autoscaler.num_actors,
            lambda: self._list_targets(fleet, endpoints),
        )
        self._list_targets(fleet, endpoints)
        metrics = await self._serve_metrics(stack, endpoints.metrics_addresses[targets.OWN])
        coordinator = await self._coordinate(stack, endpoints, fleet)
        export_coordinator(coordinator, metrics)
        coordinator.tracer = await stack.enter_async_context(
            open_tracer(self._job, COORDINATOR, targets.OWN)
        )
        coordinating = in_background(stack, coordinator.run())
        workloads = fleet.workloads()
        supervisor = self._supervise(
            stack, [each for each in workloads if each.role is not Role.EVALUATOR]
        )
        beside = self._supervise(stack, [each for each in workloads if each.role is Role.EVALUATOR])
        evaluating = in_background(stack, self._evaluate(beside))
        supervising = in_background(stack, supervisor.run())
        silence = Silence(self._display.note, self._records.take, supervisor.end)
        listening = in_background(stack, silence.watch(lambda: coordinator.silent))
        self._scale = lambda: self._autoscaler.scale(len(fleet.ready(supervisor, coordinator)))
        scaling: list[asyncio.Task[Any]] = []
        if self._job.spec.autoscale.enabled:
            scaling.append(
                in_background(
                    stack, self._autoscaler.run(fleet, endpoints, supervisor, coordinator)
                )
            )
        ending = await self._until(supervising, serving, coordinating, *scaling) or ending_of(
            supervising
        )
        for task in (listening, *scaling):
            task.cancel()
        if ending.status == "finished" and self._job.spec.evaluation is not None:
            await self._stop(ending, supervisor)
            await self._wait_for_evaluation(self._job.spec.evaluation, evaluating, serving)
        await self._stop(ending, supervisor, beside)
        await feed.settle(quiet_s=0.5, timeout_s=3.0)
        return ending

    def _supervise(self, stack: AsyncExitStack, workloads: Sequence[PlannedProcess]) -> Supervisor:
        supervisor = Supervisor(
            workloads, self._launch, self._is_finished, on_restart=self._records.count_restart
        )
        stack.callback(supervisor.kill)
        return supervisor

    async def _evaluate(self, supervisor: Supervisor) -> None:
        """Keeps the evaluator running until it is done. What becomes of it never fails the run."""
        if (failure := await supervisor.run()) is not None:
            log.warning("nothing is evaluated any more, the run goes on: %s", failure)

    async def _wait_for_evaluation(
        self,
        settings: EvaluationSettings,
        evaluating: asyncio.Task[None],
        serving: asyncio.Task[ProcessFailure],
    ) -> None:
        """After the last step: until it is evaluated, within reason. Without a result the run is
        finished all the same.
        """
        step, limit_s = self._job.spec.algorithm.steps, longest_evaluation_s(settings)
        sets = [each.name for each in settings.sets]
        self._describe = lambda: (f"evaluating step {step}", progress(self._view, sets))
        if not evaluating.done():
            self._display.note(
                f"training is finished; evaluating step {step}, {duration(limit_s)} at most"
            )
        try:
            async with asyncio.timeout(limit_s):
                if await self._until(evaluating, serving) is not None:
                    log.warning("step %d is not evaluated; the same command does it", step)
        except TimeoutError:
            log.warning(
                "step %d is not evaluated after %g s; see logs/evaluator-0.log", step, limit_s
            )

    async def _until(
        self, goal: Coroutine[Any, Any, Any] | asyncio.Task[Any], *keepers: asyncio.Task[Any]
    ) -> RunEnding | None:
        """None when `goal` is reached; an ending when a signal comes, or one of `keepers` ends
        before.
        """
        task = asyncio.ensure_future(goal)
        asked = asyncio.create_task(self._interrupt.asked.wait())
        try:
            done, _ = await asyncio.wait(
                {task, asked, *keepers}, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            asked.cancel()
        if asked in done:
            if task is not goal:
                task.cancel()
            return RunEnding("interrupted")
        if task in done:
            return None
        return ending_of(next(keeper for keeper in keepers if keeper in done))

    async def _prepare(self, serving: asyncio.Task[ProcessFailure]) -> RunEnding | None:
        """Prepares the model and tries the task; None when both succeeded."""
        argv = ("python", "-m", PREPARE_MODULE, "--job", str(self._folder.job_file))
        process = await self._start(
            PREPARE, (*argv, "--output", str(self._folder.root), "--check-task", "--check-sets")
        )
        self._describe = lambda: (
            "preparing the model",
            LOG_PREFIX.sub("", " ".join(process.last_lines(1))),
        )
        try:
            ending = await self._until(process.wait(), serving)
        finally:
            await process.stop(
                PREPARE_GRACE_S
            )  # waited for: its end must not be told to an event loop that is closed
        if ending is not None or process.exit_status == EXIT_DONE:
            return ending
        status = process.exit_status
        is_bad = status == EXIT_SETTINGS
        failure = ProcessFailure(
            PREPARE, f"ended with status {status}", process.last_lines(LAST_LINES), bad_input=is_bad
        )
        return RunEnding("failed", failure, never_began=is_bad)

    async def _coordinate(
        self, stack: AsyncExitStack, endpoints: Endpoints, fleet: Fleet
    ) -> Coordinator:
        running = await stack.enter_async_context(
            serve_coordinator(
                self._job.spec.weight_transfer,
                fleet.generator_urls,
                trainer_address=endpoints.addresses["trainer-0"],
                listen=endpoints.coordinator,
                token=self._token,
            )
        )
        self._describe = lambda: describe_phase(
            fleet.generator_urls(), running.coordinator, self._view
        )
        return running.coordinator

    async def _stop(self, ending: RunEnding, *supervisors: Supervisor) -> None:
        """Role by role, trainers first since they save a checkpoint. A second signal ends
        everything at once.
        """

        def describe() -> tuple[str, str]:
            return "stopping", ", ".join(
                name for each in supervisors for name in each.running
            ) or "reading the last metrics"

        self._describe = describe
        drain = 0.0 if ending.status == "finished" else self._job.spec.actors.drain_seconds
        grace_s = {
            Role.TRAINER: self._job.spec.trainers.drain_seconds,
            Role.ACTOR: drain + ACTOR_GRACE_S,
            Role.GENERATOR: GENERATOR_GRACE_S,
            Role.REFERENCE: GENERATOR_GRACE_S,
            Role.PREPROCESSOR: STOP_GRACE_S,
            Role.EVALUATOR: EVALUATOR_GRACE_S,
        }

        async def stop() -> None:
            await asyncio.gather(*(each.stop(grace_s) for each in supervisors))

        stopping = asyncio.create_task(stop())
        at_once = asyncio.create_task(self._interrupt.at_once.wait())
        await asyncio.wait({stopping, at_once}, return_when=asyncio.FIRST_COMPLETED)
        at_once.cancel()
        if not stopping.done():
            for each in supervisors:
                each.kill()
        await stopping

    async def _serve_metrics(self, stack: AsyncExitStack, listen: str) -> Metrics:
        """This process's."""
        metrics = own_metrics(self._job, self._records.restarts, lambda: self._scale())
        await stack.enter_async_context(serve_metrics(listen, metrics.exposition))
        return metrics

    def _list_targets(self, fleet: Fleet, endpoints: Endpoints) -> None:
        """Everybody's metrics for Prometheus."""
        try:
            text = targets_file(fleet.job, endpoints.addresses, endpoints.metrics_addresses)
            write_whole(self._folder.metrics_targets_file, text)
        except OSError as error:  # a full disk must not end the run
            log.warning("Prometheus' list of targets is not up to date: %s", error)

    def _endpoints(self, ports: Ports, nats_url: str) -> Endpoints:
        names = process_names(self._largest)
        return Endpoints(
            job_file=self._folder.job_file,
            output=self._folder.root,
            nats_url=nats_url,
            coordinator=ports.address(),
            addresses={name: ports.address() for name in names},
            trainer_master=ports.address(),
            token_file=self._folder.token_file,
            metrics_addresses={
                name: ports.address() for name in (targets.OWN, *filter(targets.needs_port, names))
            },
        )

    async def _launch(self, workload: PlannedProcess) -> LocalProcess:
        return await self._start(workload.name, workload.argv)

    async def _start(self, name: str, argv: tuple[str, ...]) -> LocalProcess:
        own = environment(self._largest, name, os.environ, os.cpu_count() or 1)
        log_file = self._folder.log_file(name)
        return await LocalProcess.start(
            name, argv, log_file=log_file, environment=own, guard=self._guard
        )

    def _is_finished(self) -> bool:
        return newest_checkpoint(self._folder.root) >= self._job.spec.algorithm.steps

    def _take(self, record: Record) -> None:
        if self._view.take(record):
            self._display.stepped(self._view)
        if line := self._view.rollback.line or evaluation_line(record):
            self._display.note(line)

    async def _refresh(self) -> None:
        """Keeps the display up to date until cancelled."""
        patience = Patience(self._job.spec.algorithm.groups_per_step)
        while True:
            self._view.phase, self._view.detail = self._describe()
            self._records.take_scale(self._scale())
            self._display.update(self._view)
            is_training = self._view.step < self._view.steps_total
            if (
                is_training
                and (explanation := patience.look(self._view, time.monotonic())) is not None
            ):
                self._display.note(explanation)
            await asyncio.sleep(TICK_S)
