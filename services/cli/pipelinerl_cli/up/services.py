"""Everything that one session runs once the model is prepared.

```
 processes     those of the plan, kept by two supervisors: one for the evaluator, whose failure
               never fails the run, and one for all others
 this process  the coordinator, its metrics, the watch over silent generators, the autoscaler
```
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pipelinerl_cli.run_folder import RunFolder, newest_checkpoint
from pipelinerl_cli.up.actors import ACTOR_GRACE_S, Autoscaler, Fleet
from pipelinerl_cli.up.endings import in_background
from pipelinerl_cli.up.live_metrics import SessionRecords
from pipelinerl_cli.up.process import Launcher
from pipelinerl_cli.up.status_lines import Silence
from pipelinerl_cli.up.supervisor import Supervisor
from pipelinerl_cli.up.targets import OWN, own_metrics, write_targets
from pipelinerl_common.metrics import COORDINATOR, serve_metrics
from pipelinerl_common.settings import Job
from pipelinerl_common.tracing import open_tracer
from pipelinerl_control.coordinator import Coordinator
from pipelinerl_control.metrics import ActorScale, export_coordinator
from pipelinerl_control.plan import Endpoints, Role, with_actors
from pipelinerl_control.service import serve_coordinator

log = logging.getLogger(__name__)

STOP_GRACE_S = 15.0
GENERATOR_GRACE_S = 5.0
"""Actors have ended by then: a generator holds nothing of value any more."""
EVALUATOR_GRACE_S = 35.0
"""Its own generator gets 30 s of it."""


@dataclass(frozen=True)
class Session:
    """What every part of one session shares."""

    job: Job
    folder: RunFolder
    token: str
    """Bearer token of all services."""
    launcher: Launcher
    records: SessionRecords
    note: Callable[[str], None]
    """Shows a line to the user."""

    def is_finished(self) -> bool:
        return newest_checkpoint(self.folder.root) >= self.job.spec.algorithm.steps


@dataclass
class Services:
    """The processes of the plan, and what runs for them in this process."""

    session: Session
    endpoints: Endpoints
    fleet: Fleet
    coordinator: Coordinator
    supervisor: Supervisor
    evaluation: Supervisor
    autoscaler: Autoscaler
    _until_stop: list[asyncio.Task[Any]] = field(default_factory=list)
    """Tasks that must not restart or move processes while they are being stopped."""

    @classmethod
    async def open(
        cls, stack: AsyncExitStack, session: Session, endpoints: Endpoints, autoscaler: Autoscaler
    ) -> "Services":
        """Serves the coordinator and the metrics of this process until the stack unwinds. Processes
        begin with `start`.
        """
        job, records = session.job, session.records
        largest = with_actors(job, job.spec.most_actors)
        list_targets = partial(write_targets, session.folder, endpoints)
        fleet = Fleet(largest, endpoints, autoscaler.num_actors, list_targets)
        list_targets(fleet.job)
        coordinating = await stack.enter_async_context(
            serve_coordinator(
                job.spec.weight_transfer,
                fleet.generator_urls,
                trainer_address=endpoints.addresses["trainer-0"],
                listen=endpoints.coordinator,
                token=session.token,
            )
        )
        coordinator = coordinating.coordinator
        supervisor, evaluation = (
            Supervisor(
                [each for each in fleet.planned() if (each.role is Role.EVALUATOR) is is_evaluator],
                session.launcher.launch,
                session.is_finished,
                on_restart=records.count_restart,
            )
            for is_evaluator in (False, True)
        )
        stack.callback(supervisor.kill)
        stack.callback(evaluation.kill)
        services = cls(session, endpoints, fleet, coordinator, supervisor, evaluation, autoscaler)
        metrics = own_metrics(job, records.restarts, services.scale)
        export_coordinator(coordinator, metrics)
        address = endpoints.metrics_addresses[OWN]
        await stack.enter_async_context(serve_metrics(address, metrics.exposition))
        tracer = open_tracer(job, COORDINATOR, OWN)
        coordinator.tracer = await stack.enter_async_context(tracer)
        return services

    def scale(self) -> ActorScale:
        return self.autoscaler.scale(len(self.fleet.ready(self.supervisor, self.coordinator)))

    def start(
        self, stack: AsyncExitStack
    ) -> tuple[asyncio.Task[Any], asyncio.Task[Any], list[asyncio.Task[Any]]]:
        """Starts the processes. Returns three kinds of tasks: the training, which ends with the
        run; the evaluation; and helpers, which end only by a failure.
        """
        records = self.session.records
        helpers = [in_background(stack, self.coordinator.run())]
        evaluating = in_background(stack, self._evaluate())
        training = in_background(stack, self.supervisor.run())
        silence = Silence(self.session.note, records.take, self.supervisor.end)
        self._until_stop.append(
            in_background(stack, silence.watch(lambda: self.coordinator.silent))
        )
        if self.session.job.spec.autoscale.enabled:
            scaling = self.autoscaler.run(
                self.fleet, self.endpoints, self.supervisor, self.coordinator
            )
            helpers.append(in_background(stack, scaling))
            self._until_stop.append(helpers[-1])
        return training, evaluating, helpers

    async def _evaluate(self) -> None:
        """Keeps the evaluator running until it is done; its failure never fails the run."""
        if (failure := await self.evaluation.run()) is not None:
            log.warning("evaluation has ended, the run continues: %s", failure)

    def release(self) -> None:
        """The watch over silent generators and the autoscaler leave the processes alone from here
        on.
        """
        for task in self._until_stop:
            task.cancel()

    async def stop(
        self, *supervisors: Supervisor, is_finished: bool, at_once: asyncio.Event
    ) -> None:
        """Ends the processes of these supervisors role by role, trainers first since they save a
        checkpoint. `at_once` ends them all immediately.
        """
        spec = self.session.job.spec
        drain = 0.0 if is_finished else spec.actors.drain_seconds
        grace_s = {
            Role.TRAINER: spec.trainers.drain_seconds,
            Role.ACTOR: drain + ACTOR_GRACE_S,
            Role.GENERATOR: GENERATOR_GRACE_S,
            Role.REFERENCE: GENERATOR_GRACE_S,
            Role.PREPROCESSOR: STOP_GRACE_S,
            Role.EVALUATOR: EVALUATOR_GRACE_S,
        }
        stopping = asyncio.gather(*(each.stop(grace_s) for each in supervisors))
        hurrying = asyncio.create_task(at_once.wait())
        either: list[asyncio.Future[Any]] = [stopping, hurrying]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        hurrying.cancel()
        if not stopping.done():
            for each in supervisors:
                each.kill()
        await stopping
