"""What the leader runs until it loses the lease.

```
 informers -> stores -> queue of job keys -> workers: reconcile -> API server
                 ^          ^     reconcile again  |          |
                 |          +----------------------+          +-> runtimes of the jobs
                 +-- answers to its own writes, ahead of the watch
```
"""

import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

from pipelinerl_common.errors import PipelineRLError
from pipelinerl_operator.controller.cluster import Watching
from pipelinerl_operator.controller.executor import Dependencies
from pipelinerl_operator.controller.reconciler import Reconciler
from pipelinerl_operator.controller.telemetry import Telemetry
from pipelinerl_operator.kube import WorkQueue
from pipelinerl_operator.kube.errors import TooManyRequests

log = logging.getLogger(__name__)

WORKERS = 4
RESYNC_S = 600.0
"""Every job is reconciled again after this time, even without an event."""
MAX_SILENCE_S = 900.0
"""A watch that is silent for longer, despite all retries, is a fault of this process."""


@dataclass
class Controller:
    """Watches the cluster and reconciles all jobs in `namespaces` (empty: in all of them)."""

    deps: Dependencies
    queue: WorkQueue
    """Receives the key of every job of which something changed in the cache."""
    telemetry: Telemetry
    namespaces: Sequence[str] = ()
    workers: int = WORKERS
    resync_s: float = RESYNC_S

    def __post_init__(self) -> None:
        self.cluster = self.deps.cluster
        self.watching = Watching(self.deps.api, self.cluster, self.namespaces)
        self._reconciler = Reconciler(self.deps)

    def fault(self) -> str:
        """A watch that has been silent for too long, or an empty text when all is well."""
        silent = [
            each.selection.resource.plural
            for each in self.watching.informers
            if each.silence_s > MAX_SILENCE_S
        ]
        return f"no event of {', '.join(silent)} for {MAX_SILENCE_S:g} s" if silent else ""

    async def run(self) -> None:
        """Runs until cancelled: watches, workers, the periodic resync and the sweep of old streams.
        Jobs are reconciled once every store holds a first full list.
        """
        self.telemetry.watch_queue(self.queue)
        self.telemetry.watch_informers(self.watching.informers)
        self.telemetry.watch_jobs(lambda: self.cluster.jobs)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.watching.run(), name="watching")
            # Without a full list, pods that exist would be created a second time.
            await self.watching.synced()
            log.info(
                "jobs=%d pods=%d known, beginning", len(self.cluster.jobs), len(self.cluster.pods)
            )
            tasks.create_task(self._resync(), name="resync")
            tasks.create_task(self._sweep(), name="sweep")
            for number in range(self.workers):
                tasks.create_task(self._work(), name=f"worker {number}")

    async def _work(self) -> None:
        """Reconciles jobs until cancelled. Consumes keys of the queue, waits for the next key."""
        while True:
            key = await self.queue.get()
            started = monotonic()
            outcome = "done"
            try:
                look_again_s = await self._reconciler.reconcile(key)
                self.queue.succeeded(key)
                if look_again_s is not None:
                    self.queue.add_after(key, look_again_s)
            except PipelineRLError as error:
                outcome = "retried"
                pause_s = self.queue.retry(
                    key, error.retry_after_s if isinstance(error, TooManyRequests) else 0.0
                )
                log.warning("job=%s tried again in %.2g s: %s", key, pause_s, error)
            except Exception:  # an unexpected error of one job must not stop the others
                outcome = "failed"
                pause_s = self.queue.retry(key)
                log.exception("job=%s reconcile failed, tried again in %.2g s", key, pause_s)
            finally:
                self.queue.done(key)
                self.telemetry.reconciled(outcome, monotonic() - started)
            if self.cluster.jobs.get(key) is None:
                self.queue.forget(key)

    async def _sweep(self) -> None:
        await self.deps.streams.run_sweeps(
            lambda: [job.uid for job in self.cluster.jobs], self.namespaces
        )

    async def _resync(self) -> None:
        """Queues every job once per period until cancelled, spread over a tenth of it, so that not
        all jobs come at once.
        """
        while True:
            await asyncio.sleep(self.resync_s)
            for view in list(self.cluster.jobs):
                self.queue.add_after(view.key, random.uniform(0, self.resync_s / 10))
