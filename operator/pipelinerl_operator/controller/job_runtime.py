"""What runs beside each job in the leader: its weight-transfer coordinator, and the reader of its
training numbers.

One gRPC server serves all coordinators; a call's bearer token says whose it is. Nothing here
writes: the reconciler asks for the state and puts it into status.
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
from pipelinerl_control.balance import Balance, Counts, Period
from pipelinerl_control.coordinator import Coordinator
from pipelinerl_control.membership import WeightGroup
from pipelinerl_control.metrics import ActorScale, export_coordinator, export_scale
from pipelinerl_control.plan import Role, generator_url
from pipelinerl_control.readings import Reading, read_metrics
from pipelinerl_control.scaling import ScalingChoice
from pipelinerl_control.service import TokenRoutes, weight_transfer
from pipelinerl_operator.controller.cluster import ClusterCache
from pipelinerl_operator.controller.decision import Wanted
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
"""Rounds of all coordinators together; changes of pods wake theirs at once whatever the pace."""
COMPLETE_S, INCOMPLETE_S = 2.0, 1.0
"""Between two rounds of one whose generators are all there, and of one that still waits for some.
"""


class JobRuntime:
    """Of one job."""

    def __init__(
        self, job: JobView, wanted: Wanted, status: JobStatus, token: str, cluster: ClusterCache
    ) -> None:
        self.uid = job.uid
        self.token = token
        self.training: TrainingStatus | None = None
        self.stream: StreamStatus | None = None
        self._key = job.key
        self._cluster = cluster
        self._num_generators = wanted.job.spec.actors.generators_per_replica
        self._floor = status.weight_group.epoch if status.weight_group else 0
        self._addresses: Mapping[str, str] = {}
        self._restarts: Mapping[str, int] = {}
        self._num_jobs = 1
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
        """Wakes the coordinator when a pod came, went or moved."""
        self._restarts = {
            "actor": status.actors.restarts,
            "preprocessor": status.preprocessor.restarts,
            "reference": status.reference.restarts if status.reference else 0,
            "trainer": status.trainers.restarts,
            "evaluator": status.evaluator.restarts if status.evaluator else 0,
        }
        self._num_jobs = num_jobs
        self._scale = ActorScale(
            status.actors.desired,
            status.actors.ready,
            status.autoscale.ratio if status.autoscale else None,
        )
        if status.autoscale != self._choice:
            self._choice = status.autoscale
            self._period.restart()
        addresses = {**self._generators(), "trainer": self._trainer() or ""}
        if addresses != self._addresses:
            self._addresses = addresses
            self.coordinator.wake()

    @property
    def balance(self) -> Balance | None:
        """Of generation and training since the last look at it."""
        return self._period.balance

    def weight_group(self) -> WeightGroupStatus:
        """The epoch never goes back: between two groups it is that of the last."""
        group = self.coordinator.group
        if group is not None:
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
        """Made anew for each scrape: everything in it is read from elsewhere."""
        metrics = Metrics(COORDINATOR, self._key.name, self._key.namespace)
        export_coordinator(self.coordinator, metrics)
        export_scale(metrics, lambda: self._scale)
        for role, count in self._restarts.items():
            metrics.counter("restarts_total").read(partial(float, count), restarted=role)
        return metrics

    async def coordinate(self, changed: Callable[[], None]) -> None:
        """For ever: forms groups. `changed` is called when there is something to put into status."""
        seen: tuple[WeightGroup | None, str] | None = None
        traced = (
            nullcontext(Tracer())
            if self._traced is None
            else open_tracer(self._traced, COORDINATOR, "operator")
        )
        async with traced as self.coordinator.tracer:
            while True:
                is_complete = self.coordinator.group is not None and not self.coordinator.absent
                self.coordinator.period_s = max(
                    COMPLETE_S if is_complete else INCOMPLETE_S, self._num_jobs / ROUNDS_PER_S
                )
                await self.coordinator.round()
                now = (
                    self.coordinator.group,
                    "" if self.coordinator.group else self.coordinator.waiting_for,
                )
                if now != seen:
                    seen = now
                    changed()

    async def read(self, session: aiohttp.ClientSession) -> bool:
        """Reads the metrics of the trainer and the preprocessor; whether they say something new."""
        trainer = await self._metrics_of(session, Role.TRAINER)
        preprocessor = await self._metrics_of(session, Role.PREPROCESSOR)
        before = (self.training, self.stream)
        if trainer is not None:
            self.training, self._before = training_status(trainer, self._before), trainer
        if preprocessor is not None:
            self.stream = stream_status(preprocessor)
        if trainer is not None and preprocessor is not None:
            self._weigh(trainer, preprocessor)
        return before != (self.training, self.stream)

    def _weigh(self, trainer: Reading, preprocessor: Reading) -> None:
        """The balance since the last look; anew whenever a process came or went."""
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
        """Base URL of every generator whose pod runs, in the order of the plan."""
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
            if (
                pod.role == role
                and is_of_job(pod, self.uid)
                and pod.ip
                and pod.phase == "Running"
                and not pod.is_deleted
            ):
                yield pod


class JobRuntimes:
    """Of all jobs. Use as `async with companions(cluster, listen, changed) as all_of_them`."""

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

    def weight_group(self, key: ObjectKey) -> WeightGroupStatus | None:
        running = self._running.get(key)
        return running[0].weight_group() if running else None

    def training(self, key: ObjectKey) -> tuple[TrainingStatus | None, StreamStatus | None]:
        running = self._running.get(key)
        return (running[0].training, running[0].stream) if running else (None, None)

    def balance(self, key: ObjectKey) -> Balance | None:
        running = self._running.get(key)
        return running[0].balance if running else None

    def follow(
        self, job: JobView, wanted: Wanted | None, status: JobStatus, token: str | None
    ) -> None:
        """Starts, keeps or stops what the job needs now. An invalid spec changes nothing of what
        runs.
        """
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
        companion, task = running
        self.routes.remove(companion.token)
        task.cancel()
        closing = asyncio.create_task(companion.coordinator.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def metrics(self) -> Iterable[Metrics]:
        """The coordinators', one for each job, made as they are read: a thousand at once would be 8
        MB.
        """
        return (companion.metrics() for companion, _ in self._running.values())

    async def read_all(self) -> None:
        """For ever: reads every job's metrics once in READ_S."""
        turns = asyncio.Semaphore(READS_AT_ONCE)

        async def read(key: ObjectKey, companion: JobRuntime) -> None:
            async with turns:
                if await companion.read(self._session):
                    self._changed(key)

        while True:
            await asyncio.sleep(READ_S)
            await asyncio.gather(
                *(read(key, companion) for key, (companion, _) in list(self._running.items()))
            )

    async def close(self) -> None:
        for key in list(self._running):
            self.forget(key)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _start(
        self, companion: JobRuntime, key: ObjectKey
    ) -> tuple[JobRuntime, asyncio.Task[None]]:
        self.routes.add(companion.token, companion.coordinator)
        task = asyncio.create_task(
            companion.coordinate(partial(self._changed, key)), name=f"coordinate {key}"
        )
        task.add_done_callback(partial(self._ended, key))
        return companion, task

    def _ended(self, key: ObjectKey, task: asyncio.Task[None]) -> None:
        """A companion never ends by itself; one that has is started again when its job is looked at
        next.
        """
        if not task.cancelled() and task.exception() is not None:
            log.error("job=%s its companion failed", key, exc_info=task.exception())
            self._changed(key)


@asynccontextmanager
async def job_runtimes(
    cluster: ClusterCache, listen: str, changed: Callable[[ObjectKey], None]
) -> AsyncIterator[JobRuntimes]:
    """Serves the `WeightTransfer` service of all jobs on `listen`. Raises SettingsError when it
    cannot be bound.
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


class NoCompanions:
    """Of jobs without weight transfer: benches and tests of the controller alone."""

    def weight_group(self, key: ObjectKey) -> WeightGroupStatus | None:
        return None

    def training(self, key: ObjectKey) -> tuple[TrainingStatus | None, StreamStatus | None]:
        return None, None

    def balance(self, key: ObjectKey) -> Balance | None:
        return None

    def follow(
        self, job: JobView, wanted: Wanted | None, status: JobStatus, token: str | None
    ) -> None:
        pass

    def forget(self, key: ObjectKey) -> None:
        pass


def _host(pod: PodView) -> str:
    return f"[{pod.ip}]" if ":" in pod.ip else pod.ip
