"""What the leader runs beside each job: its weight-transfer coordinator and the reader of its
metrics.

One gRPC server serves all coordinators; a call's bearer token says which one it is for. Nothing
here writes to the API server: the reconciler takes the reports and puts them into `status`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, nullcontext
from functools import partial

import aiohttp

from pipelinerl_common import rpc
from pipelinerl_common.metrics import COORDINATOR, Metrics
from pipelinerl_common.service import cancel_all
from pipelinerl_common.settings import Job
from pipelinerl_common.tracing import Tracer, open_tracer
from pipelinerl_control.balance import Counts, Period
from pipelinerl_control.coordinator import Coordinator
from pipelinerl_control.membership import WeightGroup
from pipelinerl_control.metrics import ActorScale, export_coordinator, export_scale
from pipelinerl_control.plan import Role, generator_url
from pipelinerl_control.readings import Reading, read_metrics
from pipelinerl_control.scaling import ScalingChoice
from pipelinerl_control.service import TokenRoutes, weight_transfer
from pipelinerl_operator.controller.cluster import ClusterCache
from pipelinerl_operator.controller.decision import RuntimeReport, Wanted
from pipelinerl_operator.controller.status import (
    MAX_MEMBERS,
    JobPhase,
    JobStatus,
    StreamStatus,
    TrainingStatus,
    WeightGroupStatus,
    stream_status,
    training_status,
)
from pipelinerl_operator.controller.views import JobView, PodView, is_of_job
from pipelinerl_operator.kube import ObjectKey
from pipelinerl_operator.objects.names import GRPC_PORT, METRICS_PORT, generator_port

log = logging.getLogger(__name__)

READ_S = 15.0
READS_AT_ONCE = 16
ROUNDS_PER_S = 50.0
"""Rate of the rounds of all coordinators together; a change of a pod wakes its coordinator at once.
"""
COMPLETE_S, INCOMPLETE_S = 2.0, 1.0
"""Seconds between two rounds of a coordinator with all its generators, and of one that waits for
some.
"""


class JobRuntime:
    """A job's weight-transfer coordinator and metrics reader, run by the leader."""

    def __init__(
        self, job: JobView, wanted: Wanted, status: JobStatus, token: str, cluster: ClusterCache
    ) -> None:
        self.uid = job.uid
        self.token = token
        self._key = job.key
        self._cluster = cluster
        self._num_generators = wanted.job.spec.actors.generators_per_replica
        self._floor = status.weight_group.epoch if status.weight_group else 0
        self._addresses: Mapping[str, str] = {}
        self._restarts: Mapping[str, int] = {}
        self._num_jobs = 1
        self._training: TrainingStatus | None = None
        self._stream: StreamStatus | None = None
        self._before: Reading | None = None
        self._choice: ScalingChoice | None = None
        self._period = Period()
        self._scale = ActorScale()
        self._traced: Job | None = (
            wanted.job.job if wanted.job.spec.telemetry.tracing is not None else None
        )
        settings = wanted.job.spec.weight_transfer
        self.coordinator = Coordinator(
            settings, self._generators, self._trainer, token=token, epoch_floor=self._floor
        )

    def update(self, status: JobStatus, num_jobs: int) -> None:
        """Takes the job's new status. Wakes the coordinator when a pod came, went or moved."""
        roles = {
            "actor": status.actors,
            "preprocessor": status.preprocessor,
            "reference": status.reference,
            "trainer": status.trainers,
            "evaluator": status.evaluator,
        }
        self._restarts = {name: role.restarts if role else 0 for name, role in roles.items()}
        self._num_jobs = num_jobs
        ratio = status.autoscale.ratio if status.autoscale else None
        self._scale = ActorScale(status.actors.desired, status.actors.ready, ratio)
        if status.autoscale != self._choice:
            self._choice = status.autoscale
            self._period.restart()
        addresses = {**self._generators(), "trainer": self._trainer() or ""}
        if addresses != self._addresses:
            self._addresses = addresses
            self.coordinator.wake()

    def report(self) -> RuntimeReport:
        """What is known about the job now."""
        return RuntimeReport(
            self._weight_group(), self._stream, self._training, self._period.balance
        )

    def _weight_group(self) -> WeightGroupStatus:
        group = self.coordinator.group
        if group is not None:
            # Between two groups the epoch is that of the last: it never decreases.
            self._floor = max(self._floor, group.epoch)
        names = list(group.names) if group else []
        return WeightGroupStatus(
            epoch=self._floor,
            world_size=group.world_size if group else 0,
            members=names[:MAX_MEMBERS],
            num_members=len(names),
            state="formed" if group else self.coordinator.waiting_for,
        )

    def metrics(self) -> Metrics:
        """Metrics of the job, created for each scrape: all values are read from elsewhere."""
        metrics = Metrics(COORDINATOR, self._key.name, self._key.namespace)
        export_coordinator(self.coordinator, metrics)
        export_scale(metrics, lambda: self._scale)
        for role, count in self._restarts.items():
            metrics.counter("restarts_total").read(partial(float, count), restarted=role)
        return metrics

    async def coordinate(self, changed: Callable[[], None]) -> None:
        """Runs the coordinator until cancelled. Consumes observations of the pods, produces groups,
        waits for the next round, is unblocked by `update`. Calls `changed` when the status changes.
        """
        coordinator = self.coordinator
        seen: tuple[WeightGroup | None, str] | None = None
        traced = (
            nullcontext(Tracer())
            if self._traced is None
            else open_tracer(self._traced, COORDINATOR, "operator")
        )
        async with traced as coordinator.tracer:
            while True:
                is_complete = coordinator.group is not None and not coordinator.absent
                pace_s = COMPLETE_S if is_complete else INCOMPLETE_S
                # With many jobs the rounds are spread, so that they do not fill the event loop.
                coordinator.period_s = max(pace_s, self._num_jobs / ROUNDS_PER_S)
                await coordinator.round()
                group = coordinator.group
                now = (group, "" if group else coordinator.waiting_for)
                if now != seen:
                    seen = now
                    changed()

    async def read(self, session: aiohttp.ClientSession) -> bool:
        """Reads the metrics of trainer and preprocessor. Returns whether the report has changed."""
        trainer = await self._metrics_of(session, Role.TRAINER)
        preprocessor = await self._metrics_of(session, Role.PREPROCESSOR)
        before = (self._training, self._stream)
        if trainer is not None:
            self._training, self._before = training_status(trainer, self._before), trainer
        if preprocessor is not None:
            self._stream = stream_status(preprocessor)
        if trainer is not None and preprocessor is not None:
            self._weigh(trainer, preprocessor)
        return before != (self._training, self._stream)

    def _weigh(self, trainer: Reading, preprocessor: Reading) -> None:
        """Adds a reading to the period, which restarts when a process came or went."""
        actors = frozenset(pod.uid for pod in self._live(Role.ACTOR) if pod.is_ready)
        others = tuple(
            pod.uid
            for role in (Role.TRAINER, Role.PREPROCESSOR)
            for pod in self._live(role)
            if pod.index == 0
        )
        self._period.take(
            Counts.of(trainer, preprocessor, actors, others),
            self._choice.step if self._choice is not None else None,
        )

    async def _metrics_of(self, session: aiohttp.ClientSession, role: Role) -> Reading | None:
        pod = next((pod for pod in self._live(role) if pod.index == 0), None)
        return None if pod is None else await read_metrics(session, f"{_host(pod)}:{METRICS_PORT}")

    def _generators(self) -> dict[str, str]:
        """Base URLs of the generators whose pods run by name, in the order of the plan."""
        return {
            f"{Role.GENERATOR.value}-{pod.index}-{number}": generator_url(
                f"{_host(pod)}:{generator_port(number)}"
            )
            for pod in sorted(self._live(Role.ACTOR), key=lambda pod: pod.index)
            for number in range(self._num_generators)
        }

    def _trainer(self) -> str | None:
        first = next((pod for pod in self._live(Role.TRAINER) if pod.index == 0), None)
        return None if first is None else f"{_host(first)}:{GRPC_PORT}"

    def _live(self, role: Role) -> Iterable[PodView]:
        for pod in self._cluster.pods.of_job(self._key):
            is_running = pod.ip and pod.phase == "Running" and not pod.is_deleted
            if pod.role == role and is_running and is_of_job(pod, self.uid):
                yield pod


class JobRuntimes:
    """The runtimes of all jobs of this leader, made by `job_runtimes`."""

    def __init__(
        self,
        cluster: ClusterCache,
        session: aiohttp.ClientSession,
        changed: Callable[[ObjectKey], None],
    ) -> None:
        self.routes = TokenRoutes()
        self._cluster = cluster
        self._session = session
        self._changed = changed
        self._running: dict[ObjectKey, tuple[JobRuntime, asyncio.Task[None]]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def report(self, key: ObjectKey) -> RuntimeReport:
        """What the job's runtime knows; nothing while there is none."""
        running = self._running.get(key)
        return running[0].report() if running else RuntimeReport()

    def follow(
        self, job: JobView, wanted: Wanted | None, status: JobStatus, token: str | None
    ) -> None:
        """Starts, keeps or stops the job's runtime. An invalid spec changes nothing that runs."""
        running = self._running.get(job.key)
        if status.is_finished or status.phase in (JobPhase.SUSPENDING, JobPhase.SUSPENDED):
            self.forget(job.key)
            return
        if wanted is None or token is None:
            return
        if (
            running is None
            or running[0].uid != job.uid
            or running[0].token != token
            or running[1].done()
        ):
            self.forget(job.key)
            running = self._running[job.key] = self._start(
                JobRuntime(job, wanted, status, token, self._cluster), job.key
            )
        running[0].update(status, len(self._running))

    def forget(self, key: ObjectKey) -> None:
        running = self._running.pop(key, None)
        if running is None:
            return
        runtime, task = running
        self.routes.remove(runtime.token)
        # Closed in the background, since deciding about other jobs must not wait for it; kept in a
        # set, since the event loop refers to its tasks only weakly.
        task.cancel()
        closing = asyncio.create_task(runtime.coordinator.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def metrics(self) -> Iterable[Metrics]:
        """Metrics of the jobs, created one after another: those of 1000 jobs at once take 8 MB."""
        return (runtime.metrics() for runtime, _ in self._running.values())

    async def read_all(self) -> None:
        """Reads the metrics of all jobs every READ_S seconds until cancelled. Produces reports and
        calls `changed` for each job whose report differs.
        """
        turns = asyncio.Semaphore(READS_AT_ONCE)

        async def read(key: ObjectKey, runtime: JobRuntime) -> None:
            async with turns:
                if await runtime.read(self._session):
                    self._changed(key)

        while True:
            await asyncio.sleep(READ_S)
            await asyncio.gather(
                *(read(key, runtime) for key, (runtime, _) in list(self._running.items()))
            )

    async def close(self) -> None:
        for key in list(self._running):
            self.forget(key)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _start(self, runtime: JobRuntime, key: ObjectKey) -> tuple[JobRuntime, asyncio.Task[None]]:
        self.routes.add(runtime.token, runtime.coordinator)
        task = asyncio.create_task(
            runtime.coordinate(partial(self._changed, key)), name=f"coordinate {key}"
        )
        task.add_done_callback(partial(self._ended, key))
        return runtime, task

    def _ended(self, key: ObjectKey, task: asyncio.Task[None]) -> None:
        """Reports a failed runtime; `follow` restarts it when the job is reconciled next."""
        if not task.cancelled() and task.exception() is not None:
            log.error("job=%s its runtime failed", key, exc_info=task.exception())
            self._changed(key)


@asynccontextmanager
async def job_runtimes(
    cluster: ClusterCache, listen: str, changed: Callable[[ObjectKey], None]
) -> AsyncIterator[JobRuntimes]:
    """Runtimes of all jobs with their `WeightTransfer` service on `listen`. Raises SettingsError
    when the address cannot be bound.
    """
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=64, force_close=True)
    ) as session:
        running = JobRuntimes(cluster, session, changed)
        reading = asyncio.create_task(running.read_all(), name="read training metrics")
        try:
            async with rpc.serve(listen, [weight_transfer(running.routes.find)], token=None):
                yield running
        finally:
            await cancel_all([reading])
            await running.close()


def _host(pod: PodView) -> str:
    return f"[{pod.ip}]" if ":" in pod.ip else pod.ip
