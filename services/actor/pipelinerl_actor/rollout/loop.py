"""The rollout loop.

    preprocessor --leases, cancels--> RolloutLoop --one task per group--> GroupRoller --HTTP-->
    generators
         ^                                 |                                  | verifier
         +-----------outcomes--------------+--------finished groups-----------+--> stream

One group is one asyncio task. It holds its lease until the group is published, reported as failed,
cancelled or handed back. The loop keeps the generators' slots filled, and somewhat more, so that
the slot of a finished trajectory is reused at once.
"""

import asyncio
import logging
import math
from dataclasses import dataclass

from pipelinerl.v1 import admission_pb2 as pb
from pipelinerl_actor.rollout.failures import FirstSuccessGuard, GroupFailed, RolloutStopped
from pipelinerl_actor.rollout.generators import Generators, wait_for_event
from pipelinerl_actor.rollout.group import GroupRoller
from pipelinerl_actor.rollout.lease_client import LeaseClient, LeaseReports
from pipelinerl_actor.rollout.metrics import RolloutMeter
from pipelinerl_actor.rollout.progress import Progress
from pipelinerl_common.errors import PermanentError, Unavailable
from pipelinerl_common.stream import Stream
from pipelinerl_common.tracing import Tracer, span
from pipelinerl_common.types import SampleGroup

log = logging.getLogger(__name__)

_LEASE_WAIT_S = 2.0
"""Longest wait for leases in one call: so often the actor receives cancels and renews its leases.
"""
_RENEW_S = 0.5
"""Pause between renewals while no lease is requested."""
_AHEAD = 0.25
"""Share of the slots that is leased beyond them."""
_MAX_LEASES_PER_SLOT_GROUP = 4
"""Groups that are verified or published hold no slot; this bounds them, as a multiple of what fills
the slots.
"""
_FAILED_IN_A_ROW = 16
"""After so many failed groups without a good one in between, new ones are leased ever more slowly.
"""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 5.0
_END_S = 30.0
"""Longest time for cancelled groups to end."""
_FLUSH_S = 5.0
_HAND_BACK_S = 10.0
"""Longest time for a group that was stopped to collect what it has sampled."""
_PUBLISH_S = 60.0


@dataclass(slots=True, eq=False)
class _Running:
    """A leased group and the task that works on it."""

    lease: pb.GroupLease
    progress: Progress
    began: float
    """Event loop's time of the lease."""
    task: asyncio.Task[None] | None = None
    ending: pb.GroupOutcome.ValueType | None = None
    """What to report of a group that is ended on purpose; set before it is."""
    stopped: bool = False


class RolloutLoop:
    """Leases groups, runs one task for each, and reports their outcomes."""

    def __init__(
        self,
        leases: LeaseClient,
        reports: LeaseReports,
        roller: GroupRoller,
        generators: Generators,
        stream: Stream,
        meter: RolloutMeter,
        tracer: Tracer,
    ) -> None:
        self._leases = leases
        self._reports = reports
        self._roller = roller
        self._generators = generators
        self._stream = stream
        self._meter = meter
        self._tracer = tracer
        self._running: dict[str, _Running] = {}
        self._changed = asyncio.Event()
        self._num_failed_in_a_row = 0
        self._guard = FirstSuccessGuard()

    async def run(self, stop: asyncio.Event, group_size: int, drain_s: float) -> None:
        """Consumes leases, produces groups, waits for the preprocessor; ends when `stop` is set.

        Groups have `group_size` trajectories. The end of the training run leaves the loop idle
        rather than ended: the trainer may return to a checkpoint, or receive more steps. After
        `stop` it leases nothing new, finishes what it can within `drain_s` seconds and hands back
        the rest. An error that no retry can fix ends it, and with it every group.
        """
        async with asyncio.TaskGroup() as tasks:
            await self._lease_and_start(stop, group_size, tasks)
            await self._drain(drain_s)
            await self._hand_back_all()
        await self._reports.flush(_FLUSH_S)

    async def _lease_and_start(
        self, stop: asyncio.Event, group_size: int, tasks: asyncio.TaskGroup
    ) -> None:
        was_done = False
        while not stop.is_set():
            if not self._running and not self._generators.num_serving_slots:
                # Without a call the preprocessor does not count this actor, so that groups and
                # their shares go to actors whose generators serve.
                await wait_for_event(stop, _RENEW_S)
                continue
            wanted = self._groups_wanted(group_size)
            response = await self._exchange(wanted)
            is_done = response.state == pb.RUN_STATE_DONE
            if is_done and not was_done:
                log.info("the run is done; waiting for the stop, or for further steps")
            was_done = is_done
            for lease in response.leases:
                self._start(lease, response.served_version, tasks)
            if is_done:
                await wait_for_event(stop, _RENEW_S)
            elif not wanted:
                await wait_for_event(self._changed, _RENEW_S)
            elif (excess := self._num_failed_in_a_row - _FAILED_IN_A_ROW) > 0:
                # Nothing but failures: the task or what it needs is broken, so prompts are not
                # used up at full speed.
                await wait_for_event(stop, min(_FIRST_PAUSE_S * excess, _MAX_PAUSE_S))

    def _groups_wanted(self, group_size: int) -> int:
        """Groups to lease so that unsampled trajectories fill the slots and a quarter more.

        Example: 64 slots, groups of 8, running ones with 60 trajectories unsampled: 80 - 60 make
        room for 3 groups.
        """
        limit, num_slots = self._generators.limit, self._generators.num_serving_slots
        num_slots = num_slots if limit is None else min(num_slots, limit)
        target = math.ceil(num_slots * (1 + _AHEAD))
        unsampled = sum(len(each.progress.unsampled) for each in self._running.values())
        room = math.ceil((target - unsampled) / group_size)
        most = max(2, _MAX_LEASES_PER_SLOT_GROUP * math.ceil(target / group_size))
        return max(0, min(room, most - len(self._running)))

    async def _exchange(self, wanted: int) -> pb.LeaseResponse:
        """Requests `wanted` groups, renews the running leases and applies what the answer says."""
        running = [lease_id for lease_id, each in self._running.items() if each.ending is None]
        # Before the call: a group that ends while it lasts is a change that ends the next wait.
        self._changed.clear()
        response = await self._leases.exchange(wanted, running, _LEASE_WAIT_S)
        self._guard.serves(response.served_version)
        self._generators.limit = (
            response.max_trajectories if response.HasField("max_trajectories") else None
        )
        is_done = response.state == pb.RUN_STATE_DONE
        for lease_id in running if is_done else response.cancelled_lease_ids:
            if (cancelled := self._end(lease_id, pb.GROUP_OUTCOME_CANCELLED)) is not None:
                cancelled.cancel()
        return response

    def _start(self, lease: pb.GroupLease, served_version: int, tasks: asyncio.TaskGroup) -> None:
        began = asyncio.get_running_loop().time()
        running = _Running(lease, self._roller.begin(lease), began)
        self._running[lease.lease_id] = running
        partial = running.progress.partial
        oldest = partial.oldest_version if partial is not None else None
        started = served_version if oldest is None else min(oldest, served_version)
        self._report(running, pb.GROUP_OUTCOME_STARTED, served_version=started)
        running.task = tasks.create_task(self._work(running), name=f"group {lease.group_id}")
        # A callback, not the end of `_work`: a task that is cancelled before its first step runs
        # none of its body.
        running.task.add_done_callback(lambda task: self._ended(running, task))

    def _ended(self, running: _Running, task: asyncio.Task[None]) -> None:
        del self._running[running.lease.lease_id]
        self._changed.set()
        if running.ending is not None and (task.cancelled() or running.stopped):
            self._report(running, running.ending)

    async def _work(self, running: _Running) -> None:
        """One group from its lease to its end; raises only what must end the actor."""
        lease = running.lease
        try:
            with self._tracer.continued(
                "rollout", lease.traceparent, group=lease.group_id, attempt=lease.attempt
            ):
                group = await self._roller.roll_out(running.progress)
                with span("publish", samples=len(group.samples)):
                    await self._publish(group, running)
        except RolloutStopped:
            running.stopped = True
        except GroupFailed as error:
            self._failed(running, error.reason, error)
        except PermanentError as error:  # the stream's: a sample over its limit
            self._meter.failed("unpublishable")
            self._failed(running, "unpublishable", error)

    async def _publish(self, group: SampleGroup, running: _Running) -> None:
        while True:
            try:
                await self._stream.publish_group(group, timeout_s=_PUBLISH_S)
                break
            except Unavailable as error:
                # Retried without a limit: the group is sampled, and its lease is renewed.
                log.warning("group=%s waits to be published: %s", group.group_id, error)
        self._num_failed_in_a_row = 0
        self._guard.succeeded()
        self._meter.published(len(group.samples), asyncio.get_running_loop().time() - running.began)

    def _failed(self, running: _Running, reason: str, error: PermanentError) -> None:
        self._num_failed_in_a_row += 1
        if self._num_failed_in_a_row == _FAILED_IN_A_ROW:
            log.error(
                "%d groups in a row failed, the last: reason=%s %s", _FAILED_IN_A_ROW, reason, error
            )
        self._meter.group_failed()
        self._report(running, pb.GROUP_OUTCOME_FAILED, reason=reason, detail=str(error)[:500])
        self._guard.failed(running.lease.prompt_index, reason, str(error))

    def _report(
        self, running: _Running, outcome: pb.GroupOutcome.ValueType, **fields: object
    ) -> None:
        progress, partial = running.progress, None
        if outcome == pb.GROUP_OUTCOME_HANDED_BACK and progress.partial is not None:
            partial = progress.partial.to_proto()
        is_lost = outcome != pb.GROUP_OUTCOME_STARTED and partial is None
        event = pb.GroupEvent(
            lease_id=running.lease.lease_id,
            outcome=outcome,
            tokens_wasted=progress.num_tokens if is_lost else 0,
            partial=partial,
            **fields,  # type: ignore[arg-type]
        )
        self._reports.add(event)

    def _end(self, lease_id: str, outcome: pb.GroupOutcome.ValueType) -> asyncio.Task[None] | None:
        """The task to end, whose group reports `outcome` then; None when it ends already."""
        running = self._running.get(lease_id)
        if running is None or running.ending is not None:
            return None
        running.ending = outcome
        return running.task

    async def _drain(self, drain_s: float) -> None:
        log.info("draining: %d groups have %g s to finish", len(self._running), drain_s)
        deadline = asyncio.get_running_loop().time() + drain_s
        while self._running and (left_s := deadline - asyncio.get_running_loop().time()) > 0:
            try:
                async with asyncio.timeout(left_s):
                    # Leases are renewed all the same: an expired one would lose its group.
                    await self._exchange(0)
                    await wait_for_event(self._changed, min(_RENEW_S, left_s))
            except TimeoutError:
                return

    async def _hand_back_all(self) -> None:
        """Ends the groups that are left. Those that another attempt can resume are stopped first,
        so that their report brings what they have sampled.
        """
        tasks = []
        for running in tuple(self._running.values()):
            task = self._end(running.lease.lease_id, pb.GROUP_OUTCOME_HANDED_BACK)
            partial = running.progress.partial
            if task is None:
                continue
            tasks.append(task)
            if partial is not None and partial.stop is not None:
                partial.stop.set()
                asyncio.get_running_loop().call_later(_HAND_BACK_S, task.cancel)
            else:
                task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_END_S)
