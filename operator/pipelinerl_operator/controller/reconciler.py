"""Reconciles one job: observe, decide, remember, act.

```
 stores + memory --observe--> Observed --decide (pure)--> Decision
 status   written first when something must be remembered, else with delay, and only if it changed
 actions  executed after what they depend on has been written
 events   recorded after what they report has been written
```
"""

import json
import logging
from collections import OrderedDict
from collections.abc import Iterable

from pipelinerl_common.errors import SettingsError
from pipelinerl_operator.controller.cluster import REFUSAL_S, JobMemory
from pipelinerl_operator.controller.decide import decide
from pipelinerl_operator.controller.decision import Child, Decision, Delete, Observed, Wanted
from pipelinerl_operator.controller.executor import Dependencies, RefusedByServer, execute
from pipelinerl_operator.controller.status import JobStatus, is_urgent, merge_patch, own_fields
from pipelinerl_operator.controller.views import JobView
from pipelinerl_operator.kube import Object, ObjectKey
from pipelinerl_operator.kube.errors import NotFound
from pipelinerl_operator.kube.resources import JOBS
from pipelinerl_operator.objects import JobResource, desired_objects

log = logging.getLogger(__name__)

GATHER_S = 2.0
"""Time during which changes of the status that nothing depends on are gathered into one write."""
TRAINING_S = 15.0
"""Least time between two writes that contain only training numbers."""
NUMBERS = frozenset({"training", "stream"})
STREAM_S = 10.0
"""Time between two requests to a stream server that has failed."""
MAX_KNOWN = 16
"""Number of parsed specs that are kept: parsing one takes milliseconds, keeping it tens of kB."""


class Reconciler:
    """Reconciles all jobs. `reconcile` never runs twice at the same time for one key."""

    def __init__(self, deps: Dependencies) -> None:
        self._deps = deps
        self._memories: dict[ObjectKey, JobMemory] = {}
        self._known: OrderedDict[tuple[str, int], tuple[Wanted | None, str]] = OrderedDict()

    async def reconcile(self, key: ObjectKey) -> float | None:
        """Reconciles once. Returns the seconds after which to do it again, or None when only a
        change makes it necessary.

        Raises PipelineRLError; the caller then retries after a delay.
        """
        job, runtimes = self._deps.cluster.jobs.get(key), self._deps.runtimes
        if job is None:
            self._forget(key)
            return None
        memory = self._memory(job)
        seen = self._observe(job, memory)
        decision = decide(seen)
        if decision.ignored:
            runtimes.forget(key)
            return None
        # Remembered facts are written before the actions: a new leader must not repeat them.
        delay_s = await self._remember(seen, decision, memory)
        memory.pods = _pods_to_expect(seen, decision)
        token = memory.token
        runtimes.follow(job, seen.wanted, decision.status, token)
        if delay_s is None:
            for note in decision.notes:
                await self._deps.recorder.record(job, note)
        try:
            await execute(self._deps, job, seen.wanted, decision.actions, memory)
        except RefusedByServer as refusal:
            log.warning("job=%s %s", key, refusal)
            return 0.0  # reconcile again to report it
        if memory.token != token:
            # A new leader has just read the token; for a healthy job there may be no next time.
            runtimes.follow(job, seen.wanted, decision.status, memory.token)
        all_ended = all(pod.has_ended for pod in seen.pods)
        if decision.status.is_finished and not memory.has_left and all_ended:
            # What a finished job reserves on the stream server is not available to others.
            memory.has_left = True
            self._deps.streams.leave(job)
        retry_s = REFUSAL_S if seen.refusal or seen.namespace_is_going else None
        stream_s = STREAM_S if memory.stream_fault else None
        waits = (delay_s, decision.look_again_s, retry_s, stream_s)
        return min((wait for wait in waits if wait is not None), default=None)

    def _memory(self, job: JobView) -> JobMemory:
        memory = self._memories.get(job.key)
        if memory is None or memory.job.uid != job.uid:
            self._forget(job.key)
            memory = self._memories[job.key] = JobMemory(job)
        memory.job = job
        return memory

    def _forget(self, key: ObjectKey) -> None:
        """Releases everything that belongs to a job that no longer exists."""
        memory = self._memories.pop(key, None)
        if memory is not None:
            self._deps.streams.leave(memory.job)
        self._deps.runtimes.forget(key)
        self._deps.recorder.forget(key)

    def _observe(self, job: JobView, memory: JobMemory) -> Observed:
        body = job.body
        status = body.get("status") or {}
        wanted, fault = self._wanted(job, body)
        now = self._deps.monotonic()
        # A pod that is missing now and was expected was removed by others: that is a failure.
        pods = self._deps.cluster.pods.of_job(job.key)
        names = {pod.key.name for pod in pods}
        return Observed(
            now=self._deps.clock(),
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
            **self._deps.runtimes.report(job.key)._asdict(),
        )

    def _children(self, job: JobView, memory: JobMemory) -> tuple[Child, ...]:
        children = []
        for resource, store in self._deps.cluster.children.items():
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
                wanted = Wanted(resource, desired_objects(resource, self._deps.context))
                self._known[version] = (wanted, "")
            except SettingsError as error:
                self._known[version] = (None, str(error))
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(version)
        return self._known[version]

    async def _remember(
        self, seen: Observed, decision: Decision, memory: JobMemory
    ) -> float | None:
        """Writes the status if it is urgent or has waited long enough, else returns how many
        seconds it may still wait. None when the API server has the status.
        """
        job = seen.job
        document = decision.status.written()
        patch = merge_patch(own_fields(seen.status), document)
        version = (job.resource_version, hash(json.dumps(document, sort_keys=True)))
        if not patch or memory.written == version:  # the latter: fields that the CRD does not have
            memory.noticed_at = None
            return None
        now = self._deps.monotonic()
        if not is_urgent(seen.before, decision.status):
            wait_s = _may_wait_s(patch.keys(), memory, now)
            if wait_s > 0:
                return wait_s
        body = {"metadata": {"resourceVersion": job.resource_version}, "status": patch}
        try:
            written = await self._deps.api.patch(JOBS, *job.key, body, "status")
        except NotFound:
            self._deps.cluster.jobs.remove(job.key, job.uid)
            raise
        memory.noticed_at = None
        memory.training_written_at = now if patch.keys() & NUMBERS else memory.training_written_at
        memory.written = (written["metadata"]["resourceVersion"], version[1])
        self._deps.cluster.jobs.put(written)
        return None


def _pods_to_expect(seen: Observed, decision: Decision) -> dict[str, int]:
    """Attempts by name of the pods that should still exist next time, unless others remove them."""
    going = {action.uid for action in decision.actions if isinstance(action, Delete)}
    left = [pod for pod in seen.own_pods if not pod.is_deleted and pod.uid not in going]
    return {pod.key.name: pod.attempt for pod in left}


def _may_wait_s(changed: Iterable[str], memory: JobMemory, now: float) -> float:
    if NUMBERS.issuperset(changed):
        return memory.training_written_at + TRAINING_S - now
    if memory.noticed_at is None:
        memory.noticed_at = now
    return memory.noticed_at + GATHER_S - now
