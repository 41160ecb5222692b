"""Each job's place on the stream's server: made before its pods are, removed after the job is gone.

No finalizer holds a job or its namespace back for it: what no leader saw go is found and removed
later.
"""

import asyncio
import logging
from collections.abc import Callable, Collection

from pipelinerl_common.errors import SettingsError, Unavailable
from pipelinerl_operator.controller.views import JobView
from pipelinerl_operator.kube import ObjectKey
from pipelinerl_operator.nats.streams import StreamAdmin
from pipelinerl_operator.objects import JobResource

log = logging.getLogger(__name__)

MAX_AT_ONCE = 8
SWEEP_S = 600.0
CLOSE_S = 5.0


class JobStreams:
    """`admin` None: nothing is made beforehand, and pods log in with the job's token or not at all."""

    def __init__(self, admin: StreamAdmin | None) -> None:
        self._admin = admin
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)
        self._leaving: dict[ObjectKey, asyncio.Task[None]] = {}

    async def ensure(self, job: JobResource) -> str | None:
        """Content of `nats.creds` in the job's Secret, None without one. Raises Unavailable."""
        if self._admin is None:
            return None
        predecessor = self._leaving.get(ObjectKey(job.namespace, job.name))
        if predecessor is not None:
            await asyncio.wait({predecessor})
        return await self._admin.ensure(job)

    async def sweep_for_ever(
        self, uids: Callable[[], Collection[str]], namespaces: Collection[str]
    ) -> None:
        """Now and then removes the places of jobs that no leader has seen go."""
        while self._admin is not None:
            try:
                await self._admin.sweep(uids, namespaces)
            except Unavailable as error:
                log.info("places of jobs that are gone are looked for later: %s", error)
            await asyncio.sleep(SWEEP_S)

    def leave(self, job: JobView) -> None:
        """Removes it in the background."""
        if self._admin is None:
            return
        task = asyncio.create_task(
            self._remove(self._admin, job), name=f"remove streams of {job.key}"
        )
        self._leaving[job.key] = task
        task.add_done_callback(
            lambda done: (
                self._leaving.pop(job.key, None) if self._leaving.get(job.key) is done else None
            )
        )

    async def close(self) -> None:
        if self._leaving:
            await asyncio.wait(set(self._leaving.values()), timeout=CLOSE_S)
        for task in self._leaving.values():
            task.cancel()

    async def _remove(self, admin: StreamAdmin, job: JobView) -> None:
        try:
            resource = JobResource.parse(job.body)
        except SettingsError:  # an invalid job never had a place
            return
        async with self._turns:
            await admin.remove(resource)
