"""One look at one job: observe, decide, remember, act.

```
 stores + memory --observe--> Observed --decide (pure)--> Decision
 status  written first when something must be remembered, else at leisure, and only when it changed
 actions carried out after what they rest on has been written
 events  told after what they tell of has been written
```
"""

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from pipelinerl_common.errors import SettingsError
from pipelinerl_control.balance import Balance
from pipelinerl_operator.controller.cluster import REFUSAL_S, ClusterCache, Memory
from pipelinerl_operator.controller.decide import decide
from pipelinerl_operator.controller.decision import Child, Decision, Delete, Note, Observed, Wanted
from pipelinerl_operator.controller.executor import Executor, RefusedByServer
from pipelinerl_operator.controller.status import (
    JobStatus,
    StreamStatus,
    TrainingStatus,
    WeightGroupStatus,
    is_urgent,
    merge_patch,
    own_fields,
)
from pipelinerl_operator.controller.streams import JobStreams
from pipelinerl_operator.controller.views import JobView, is_of_job
from pipelinerl_operator.kube import Api, Object, ObjectKey
from pipelinerl_operator.kube.errors import NotFound
from pipelinerl_operator.kube.resources import JOBS
from pipelinerl_operator.objects import JobResource, OperatorContext, desired_objects

log = logging.getLogger(__name__)

LEISURE_S = 2.0
"""How long changes of the status that nothing rests on are gathered into one write."""
TRAINING_S = 15.0
"""Least time between two writes of nothing but training numbers."""
NUMBERS = frozenset({"training", "stream"})
STREAM_S = 10.0
"""How soon to ask the stream's server again."""
MAX_KNOWN = 16
"""Parsed specs that are kept: reading one takes milliseconds, keeping one takes tens of kilobytes.
"""


class Companions(Protocol):
    """What runs beside a job in the leader: its weight-transfer coordinator and the reader of its
    training numbers.
    """

    def weight_group(self, key: ObjectKey) -> WeightGroupStatus | None: ...
    def training(self, key: ObjectKey) -> tuple[TrainingStatus | None, StreamStatus | None]: ...
    def balance(self, key: ObjectKey) -> Balance | None: ...
    def follow(
        self, job: JobView, wanted: Wanted | None, status: JobStatus, token: str | None
    ) -> None:
        """Starts, keeps or stops what the job needs now."""

    def forget(self, key: ObjectKey) -> None: ...


class Recorder(Protocol):
    """Where events go."""

    async def record(self, job: JobView, note: Note) -> None: ...
    def forget(self, key: ObjectKey) -> None: ...


@dataclass(frozen=True)
class Dependencies:
    context: OperatorContext
    companions: Companions
    recorder: Recorder
    streams: JobStreams
    clock: Callable[[], float] = time.time
    """Seconds since the epoch."""
    monotonic: Callable[[], float] = time.monotonic


class Reconciler:
    """Of all jobs; `reconcile` never runs twice at once for one key."""

    def __init__(self, api: Api, cluster: ClusterCache, surroundings: Dependencies) -> None:
        self._api = api
        self._cluster = cluster
        self._around = surroundings
        self._executor = Executor(api, cluster, surroundings.streams, surroundings.monotonic)
        self._memories: dict[ObjectKey, Memory] = {}
        self._known: OrderedDict[tuple[str, int], tuple[Wanted | None, str]] = OrderedDict()

    async def reconcile(self, key: ObjectKey) -> float | None:
        """Seconds after which to look again, None when only a change makes it worth while.

        Raises PipelineRLError to be called again after a pause.
        """
        job = self._cluster.jobs.get(key)
        if job is None:
            self._forget(key)
            return None
        memory = self._memory(job)
        seen = self._observe(job, memory)
        decision = decide(seen)
        if decision.ignored:
            self._around.companions.forget(key)
            return None
        delay_s = await self._remember(seen, decision, memory)
        memory.pods = _there(seen, decision)
        token = memory.token
        self._around.companions.follow(job, seen.wanted, decision.status, token)
        if delay_s is None:
            for note in decision.notes:
                await self._around.recorder.record(job, note)
        try:
            await self._executor.carry_out(job, seen.wanted, decision.actions, memory)
        except RefusedByServer as refusal:
            log.warning("job=%s %s", key, refusal)
            return 0.0  # to say so
        if (
            memory.token != token
        ):  # as a new leader has just read it; of a job that is well nothing may call it here again
            self._around.companions.follow(job, seen.wanted, decision.status, memory.token)
        if (
            decision.status.is_finished
            and not memory.has_left
            and not any(not pod.has_ended for pod in seen.pods)
        ):
            memory.has_left = True  # what is reserved for a finished job is missing for others
            self._around.streams.leave(job)
        asking_again_s = REFUSAL_S if seen.refusal or seen.namespace_is_going else None
        stream_s = STREAM_S if memory.stream_fault else None
        waits = (delay_s, decision.look_again_s, asking_again_s, stream_s)
        return min((wait for wait in waits if wait is not None), default=None)

    def _memory(self, job: JobView) -> Memory:
        memory = self._memories.get(job.key)
        if memory is None or memory.job.uid != job.uid:
            self._forget(job.key)
            memory = self._memories[job.key] = Memory(job)
        memory.job = job
        return memory

    def _forget(self, key: ObjectKey) -> None:
        """Of a job that is gone."""
        memory = self._memories.pop(key, None)
        if memory is not None:
            self._around.streams.leave(memory.job)
        self._around.companions.forget(key)
        self._around.recorder.forget(key)

    def _observe(self, job: JobView, memory: Memory) -> Observed:
        body = job.body
        status = body.get("status") or {}
        wanted, fault = self._wanted(job, body)
        now = self._around.monotonic()
        training, stream = self._around.companions.training(job.key)
        pods = self._cluster.pods.of_job(job.key)
        names = {pod.key.name for pod in pods}
        return Observed(
            now=self._around.clock(),
            job=job,
            spec=body.get("spec") or {},
            status=status,
            before=JobStatus.read(status),
            wanted=wanted,
            fault=fault,
            pods=pods,
            gone={name: attempt for name, attempt in memory.pods.items() if name not in names},
            children=self._children(job, memory),
            has_secret=memory.is_ensured(job.generation, now),
            stream_fault=memory.stream_fault,
            refusal=memory.current_refusal(job.generation, now),
            templates_checked=memory.checked_generation == job.generation,
            namespace_is_going=memory.namespace_is_going(now),
            weight_group=self._around.companions.weight_group(job.key),
            stream=stream,
            training=training,
            balance=self._around.companions.balance(job.key),
        )

    def _children(self, job: JobView, memory: Memory) -> tuple[Child, ...]:
        children = []
        for resource, store in self._cluster.children.items():
            for view in store.of_job(job.key):
                version = (view.uid, view.content_version)
                applied = memory.applied.setdefault((resource, view.key.name), version)
                children.append(Child(resource, view, is_current=applied == version))
        return tuple(children)

    def _wanted(self, job: JobView, body: Object) -> tuple[Wanted | None, str]:
        """What the spec asks for, or what is wrong with it."""
        version = (job.uid, job.generation)
        if version not in self._known:
            try:
                resource = JobResource.parse(body)
                self._known[version] = (
                    Wanted(resource, desired_objects(resource, self._around.context)),
                    "",
                )
            except SettingsError as error:
                self._known[version] = (None, str(error))
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(version)
        return self._known[version]

    async def _remember(self, seen: Observed, decision: Decision, memory: Memory) -> float | None:
        """Writes the status if it must be now or has waited long enough; else how many seconds it
        may still wait.

        None when the API server has it.
        """
        job = seen.job
        document = decision.status.written()
        patch = merge_patch(own_fields(seen.status), document)
        fingerprint = hash(json.dumps(document, sort_keys=True))
        if not patch or memory.written == (
            job.resource_version,
            fingerprint,
        ):  # the latter: fields that the CRD does not know
            memory.noticed_at = None
            return None
        now = self._around.monotonic()
        if (
            not is_urgent(seen.before, decision.status)
            and (wait_s := _leisure_left(patch.keys(), memory, now)) > 0
        ):
            return wait_s
        body = {"metadata": {"resourceVersion": job.resource_version}, "status": patch}
        try:
            written = await self._api.patch_status(JOBS, job.key.namespace, job.key.name, body)
        except NotFound:
            self._cluster.jobs.remove(job.key, job.uid)
            raise
        memory.noticed_at = None
        memory.training_written_at = now if patch.keys() & NUMBERS else memory.training_written_at
        memory.written = (written["metadata"]["resourceVersion"], fingerprint)
        self._cluster.jobs.put(written)
        return None


def _there(seen: Observed, decision: Decision) -> dict[str, int]:
    """The job's pods whose absence at the next look is somebody else's doing."""
    going = {action.uid for action in decision.actions if isinstance(action, Delete)}
    own = [pod for pod in seen.pods if is_of_job(pod, seen.job.uid)]
    return {pod.key.name: pod.attempt for pod in own if not pod.is_deleted and pod.uid not in going}


def _leisure_left(changed: Iterable[str], memory: Memory, now: float) -> float:
    if NUMBERS.issuperset(changed):
        return memory.training_written_at + TRAINING_S - now
    if memory.noticed_at is None:
        memory.noticed_at = now
    return memory.noticed_at + LEISURE_S - now
