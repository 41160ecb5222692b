"""The actor's side of Admission: leases in, outcomes out."""

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Sequence

from pipelinerl.v1 import admission_pb2 as pb
from pipelinerl.v1.admission_pb2_grpc import AdmissionStub
from pipelinerl_actor.rollout.failures import backoff_s
from pipelinerl_common.errors import TemporaryError
from pipelinerl_common.rpc import Channel, call

log = logging.getLogger(__name__)

_CALL_S = 20.0
_MAX_PAUSE_S = 1.0
"""Between two tries to lease while the preprocessor is away: it is one call from one actor, and
generators wait for it.
"""
_MAX_EVENTS_PER_CALL = 256
_MAX_BYTES_PER_CALL = 16 << 20
_MAX_WAITING_EVENTS = 65536
"""Events wait only while the preprocessor is away, which grants nothing then: a bound that nothing
reaches.
"""


class LeaseClient:
    """Asks for leases and renews what runs. A preprocessor that is away is waited for."""

    def __init__(self, channel: Channel, actor_id: str) -> None:
        self._stub = AdmissionStub(channel)
        self.actor_id = actor_id
        self._session_id = uuid.uuid4().hex
        self._num_failures = 0

    async def exchange(
        self, max_groups: int, running: Sequence[str], wait_s: float
    ) -> pb.LeaseResponse:
        """One call, which lasts up to `wait_s` when it asks for groups. Empty (after a pause) while
        the preprocessor is away.

        Raises what no waiting can help: a wrong token, a request that the preprocessor refuses.
        """
        request = pb.LeaseRequest(
            actor_id=self.actor_id,
            session_id=self._session_id,
            max_groups=max_groups,
            wait_s=wait_s,
            running_lease_ids=running,
        )
        try:
            response = await call(self._stub.Lease, request, timeout_s=wait_s + _CALL_S)
        except TemporaryError as error:
            self._num_failures += 1
            log.log(
                logging.WARNING if self._num_failures == 1 else logging.DEBUG,
                "waiting for the preprocessor: %s",
                error,
            )
            await asyncio.sleep(min(backoff_s(self._num_failures), _MAX_PAUSE_S))
            return pb.LeaseResponse(served_version=-1, state=pb.RUN_STATE_RUNNING)
        if self._num_failures:
            log.info("the preprocessor answers again")
        self._num_failures = 0
        return response


class LeaseReports:
    """Tells the preprocessor what became of leases, in order, for as long as it takes."""

    def __init__(self, channel: Channel, actor_id: str) -> None:
        self._stub = AdmissionStub(channel)
        self._actor_id = actor_id
        self._events: deque[pb.GroupEvent] = deque()
        self._loads: Sequence[pb.GeneratorLoad] = ()
        self._added = asyncio.Event()
        self._told = asyncio.Event()
        self._told.set()

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
        self._told.clear()

    def add_loads(self, loads: Sequence[pb.GeneratorLoad]) -> None:
        """The generators' present load, in place of what was not told yet."""
        self._loads = loads
        self._added.set()

    async def run(self) -> None:
        """Consumes events and loads, calls Report, waits for events or the preprocessor, never
        ends.
        """
        while True:
            await self._added.wait()
            await self._tell(self._next_events())
            if not self._events and not self._loads:
                self._added.clear()
                self._told.set()

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

    async def _tell(self, events: list[pb.GroupEvent]) -> None:
        num_failures = 0
        while True:
            loads, self._loads = self._loads, ()
            request = pb.ReportRequest(actor_id=self._actor_id, events=events, loads=loads)
            try:
                await call(self._stub.Report, request, timeout_s=_CALL_S)
                return
            except TemporaryError as error:
                num_failures += 1
                if not events:
                    self._loads = ()
                    return  # a load that could not be told is old by now
                log.debug(
                    "%d reports wait for the preprocessor: %s",
                    len(events) + len(self._events),
                    error,
                )
            await asyncio.sleep(backoff_s(num_failures))

    async def flush(self, timeout_s: float) -> None:
        """Waits until all is told; a lease that is not handed back in time expires."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._told.wait()
        except TimeoutError:
            log.warning("reports could not be delivered within %g s", timeout_s)
