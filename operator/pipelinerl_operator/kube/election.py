"""Leader election among the replicas, by a Lease with optimistic locking.

A candidate takes the lease when it is free, or when its record has not changed for its duration on
the candidate's own monotonic clock: clocks of different nodes are never compared. The leader renews
it. When that fails for `renew_s`, which is shorter than the duration, the leader stops its work
before another replica can start.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from pipelinerl_common.errors import FatalError, PipelineRLError
from pipelinerl_operator.kube.client import Api
from pipelinerl_operator.kube.errors import AlreadyExists, Conflict, NotFound
from pipelinerl_operator.kube.resources import LEASES, Object, ObjectKey

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Times of the election in seconds."""

    duration_s: float = 15.0
    renew_s: float = 10.0
    """The leader stops when it could not renew the lease for this long."""
    retry_s: float = 2.0
    stop_s: float = 4.0
    """Longest time in which the leader's work may stop: less than `duration_s` - `renew_s`."""


class Election:
    """This replica's part in the election of lease `key`. No other replica, not even an earlier
    one, may have the same `identity`.
    """

    def __init__(
        self, api: Api, key: ObjectKey, identity: str, times: LeaseTimes | None = None
    ) -> None:
        self.is_leader = False
        self._api = api
        self._key = key
        self._identity = identity
        self._times = times or LeaseTimes()
        self._seen: Object | None = None
        self._seen_at = 0.0
        """Monotonic time at which `_seen` was first seen."""

    async def run(self, lead: Callable[[], Awaitable[None]], stop: asyncio.Event) -> None:
        """Calls `lead` whenever elected, until `stop` is set; then the lease is released.

        Raises what `lead` raises, and FatalError when the work of a leader that lost the lease does
        not stop in time: the process must then end.
        """
        stopping = asyncio.create_task(stop.wait(), name="stop")
        try:
            while not stop.is_set():
                if await self._acquire():
                    await self._lead(lead, stopping)
                # Jitter: replicas that started together must not conflict at every attempt.
                await _sleep_or(stopping, self._times.retry_s * random.uniform(0.8, 1.2))
        finally:
            stopping.cancel()

    async def _lead(
        self, lead: Callable[[], Awaitable[None]], stopping: asyncio.Task[bool]
    ) -> None:
        log.info("identity=%s leads", self._identity)
        self.is_leader = True
        working = asyncio.ensure_future(lead())
        renewing = asyncio.create_task(self._renew_while_possible(), name="renew lease")
        try:
            done, _ = await asyncio.wait(
                {working, renewing, stopping}, return_when=asyncio.FIRST_COMPLETED
            )
            if working in done:
                working.result()
                raise FatalError("the leader's work ended by itself")
            if renewing in done:
                log.error("identity=%s has lost the lease and stops", self._identity)
        finally:
            self.is_leader = False
            working.cancel()
            _, still = await asyncio.wait({working}, timeout=self._times.stop_s)
            # Renewed until the work has stopped, so that no other replica starts beside it.
            renewing.cancel()
            if still:
                raise FatalError(
                    f"the leader's work did not stop within {self._times.stop_s:g} s of losing the "
                    "lease"
                )
            if not working.cancelled() and (error := working.exception()) is not None:
                log.error("the leader's work failed while it stopped", exc_info=error)
            await self._release()

    async def _renew_while_possible(self) -> None:
        """Renews the lease. Returns when another replica holds it or when it was not renewed in
        time.
        """
        renewed_at = time.monotonic()
        while (left_s := self._times.renew_s - (time.monotonic() - renewed_at)) > 0:
            await asyncio.sleep(min(self._times.retry_s, left_s))
            begun = time.monotonic()  # not after the call: the lease counts from when it was sent
            try:
                # Not `wait_for`: before Python 3.12 it can lose the cancellation of this task.
                async with asyncio.timeout(max(0.1, left_s - self._times.retry_s)):
                    holds = await self._try_acquire()
                if not holds:
                    return
                renewed_at = begun
            except (PipelineRLError, TimeoutError) as error:
                log.warning("lease=%s was not renewed: %s", self._key, error)

    async def _acquire(self) -> bool:
        """Whether this replica holds the lease now."""
        try:
            return await self._try_acquire()
        except PipelineRLError as error:
            # Another replica was faster, or the API server is unreachable: the next attempt shows.
            level = logging.DEBUG if isinstance(error, Conflict) else logging.WARNING
            log.log(level, "lease=%s: %s", self._key, error)
            return False

    async def _try_acquire(self) -> bool:
        try:
            lease = await self._api.get(LEASES, self._key.namespace, self._key.name)
        except NotFound:
            body = {
                "apiVersion": LEASES.api_version,
                "kind": LEASES.kind,
                "metadata": {"name": self._key.name},
            }
            try:
                await self._api.create(
                    LEASES, self._key.namespace, {**body, "spec": self._claim({})}
                )
            except AlreadyExists:
                return False
            return True
        if self._seen is None or self._seen["spec"] != lease.get("spec", {}):
            self._seen, self._seen_at = {**lease, "spec": lease.get("spec", {})}, time.monotonic()
        held = self._seen["spec"]
        if held.get("holderIdentity") not in ("", None, self._identity) and not self._is_over(held):
            return False
        await self._api.replace(LEASES, self._key.namespace, {**lease, "spec": self._claim(held)})
        return True

    def _is_over(self, held: Object) -> bool:
        return time.monotonic() - self._seen_at > float(
            held.get("leaseDurationSeconds") or self._times.duration_s
        )

    def _claim(self, held: Object) -> Object:
        now = _micro_time()
        ours = held.get("holderIdentity") == self._identity
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(1, round(self._times.duration_s)),
            "acquireTime": held.get("acquireTime", now) if ours else now,
            "renewTime": now,
            "leaseTransitions": int(held.get("leaseTransitions") or 0) + (0 if ours else 1),
        }

    async def _release(self) -> None:
        """Releases the lease. If that fails, the next leader waits for the duration."""
        try:
            async with asyncio.timeout(self._times.retry_s):
                lease = await self._api.get(LEASES, self._key.namespace, self._key.name)
                if lease["spec"].get("holderIdentity") == self._identity:
                    spec = {
                        **lease["spec"],
                        "holderIdentity": "",
                        "leaseDurationSeconds": 1,
                        "renewTime": _micro_time(),
                    }
                    await self._api.replace(LEASES, self._key.namespace, {**lease, "spec": spec})
        except (PipelineRLError, TimeoutError) as error:
            log.warning("lease=%s was not released: %s", self._key, error)


def _micro_time() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


async def _sleep_or(event: asyncio.Task[bool], seconds: float) -> None:
    await asyncio.wait({event}, timeout=seconds)
