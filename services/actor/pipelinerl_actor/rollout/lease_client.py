"""The actor's side of the Admission service: leases in, outcomes out."""

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Sequence

from pipelinerl.v1 import admission_pb2 as pb
from pipelinerl.v1.admission_pb2_grpc import AdmissionStub
from pipelinerl_common.backoff import Backoff
from pipelinerl_common.errors import TemporaryError
from pipelinerl_common.rpc import Channel, call

log = logging.getLogger(__name__)

_CALL_S = 20.0
_MAX_PAUSE_S = 1.0
"""Between two attempts to lease from an unreachable preprocessor: one call from each actor costs it
little, and generators idle meanwhile.
"""
_MAX_EVENTS_PER_CALL = 256
_MAX_BYTES_PER_CALL = 16 << 20
_MAX_WAITING_EVENTS = 65536
"""A bound that is not reached in practice: events wait only while the preprocessor is unreachable,
and it grants no leases then.
"""


class LeaseClient:
    """Requests leases and renews those of running groups; outlasts an unreachable preprocessor."""

    def __init__(self, channel: Channel, actor_id: str) -> None:
        self._stub = AdmissionStub(channel)
        self._actor_id = actor_id
        self._session_id = uuid.uuid4().hex
        self._backoff = Backoff(max_s=_MAX_PAUSE_S)

    async def exchange(
        self, max_groups: int, running: Sequence[str], wait_s: float
    ) -> pb.LeaseResponse:
        """One call, which lasts up to `wait_s` when it requests groups. Returns an empty response,
        after a pause, while the preprocessor is unreachable.

        Raises what no waiting fixes: a wrong token, a request that the preprocessor refuses.
        """
        request = pb.LeaseRequest(
            actor_id=self._actor_id,
            session_id=self._session_id,
            max_groups=max_groups,
            wait_s=wait_s,
            running_lease_ids=running,
        )
        try:
            response = await call(self._stub.Lease, request, timeout_s=wait_s + _CALL_S)
        except TemporaryError as error:
            level = logging.DEBUG if self._backoff.num_failures else logging.WARNING
            log.log(level, "waiting for the preprocessor: %s", error)
            await self._backoff.sleep()
            # An answer rather than an error: groups that run now may finish meanwhile.
            return pb.LeaseResponse(served_version=-1, state=pb.RUN_STATE_RUNNING)
        if self._backoff.num_failures:
            log.info("the preprocessor answers again")
        self._backoff.reset()
        return response


class LeaseReports:
    """Queue of the leases' outcomes, reported to the preprocessor in order and retried until
    acknowledged; and the generators' loads, of which only the newest is.
    """

    def __init__(self, channel: Channel, actor_id: str) -> None:
        self._stub = AdmissionStub(channel)
        self._actor_id = actor_id
        self._events: deque[pb.GroupEvent] = deque()
        self._loads: Sequence[pb.GeneratorLoad] = ()
        self._added = asyncio.Event()
        self._delivered = asyncio.Event()
        self._delivered.set()

    def add(self, event: pb.GroupEvent) -> None:
        if len(self._events) >= _MAX_WAITING_EVENTS:
            log.error(
                "a report about lease %s is dropped, %d wait already",
                event.lease_id,
                len(self._events),
            )
            return
        self._events.append(event)
        self._added.set()
        self._delivered.clear()

    def add_loads(self, loads: Sequence[pb.GeneratorLoad]) -> None:
        """Replaces loads that were not reported yet."""
        self._loads = loads
        self._added.set()

    async def run(self) -> None:
        """Consumes events and loads, produces calls of Report, waits for events or the
        preprocessor; runs until cancelled.
        """
        while True:
            await self._added.wait()
            await self._deliver(self._next_events())
            # Only after the call: what was added while it lasted must not be forgotten.
            if not self._events and not self._loads:
                self._added.clear()
                self._delivered.set()

    def _next_events(self) -> list[pb.GroupEvent]:
        """As many as one call may carry; partial groups can be large."""
        events: list[pb.GroupEvent] = []
        num_bytes = 0
        while (
            self._events and len(events) < _MAX_EVENTS_PER_CALL and num_bytes < _MAX_BYTES_PER_CALL
        ):
            events.append(self._events.popleft())
            num_bytes += events[-1].ByteSize()
        return events

    async def _deliver(self, events: list[pb.GroupEvent]) -> None:
        backoff = Backoff()
        while True:
            loads, self._loads = self._loads, ()
            request = pb.ReportRequest(actor_id=self._actor_id, events=events, loads=loads)
            try:
                await call(self._stub.Report, request, timeout_s=_CALL_S)
                return
            except TemporaryError as error:
                if not events:
                    # A load is outdated by the time that a retry would deliver it.
                    self._loads = ()
                    return
                num_waiting = len(events) + len(self._events)
                log.debug("%d reports wait for the preprocessor: %s", num_waiting, error)
            await backoff.sleep()

    async def flush(self, timeout_s: float) -> None:
        """Waits until all is reported; a lease that is not handed back in time expires."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._delivered.wait()
        except TimeoutError:
            log.warning("reports could not be delivered within %g s", timeout_s)
