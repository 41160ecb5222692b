"""The rollout loop.

    preprocessor --leases, cancels--> RolloutLoop --one task per group--> GroupRoller --HTTP-->
    generators
         ^                                 |                                  | verifier
         +-----------outcomes--------------+--------finished groups-----------+--> stream

One group is one asyncio task. It holds its lease until the group is published, reported as failed,
cancelled or handed back. The loop keeps the generators' slots filled, and somewhat more, so that a
finished trajectory's slot is taken at once.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from pipelinerl.v1 import admission_pb2 as pb
from pipelinerl_actor.rollout.failures import FirstSuccessGuard
from pipelinerl_actor.rollout.group import GroupFailed, GroupRoller, GroupStopped, Progress
from pipelinerl_actor.rollout.lease_client import LeaseClient, LeaseReports
from pipelinerl_actor.rollout.metrics import RolloutMeter
from pipelinerl_common.errors import PermanentError, Unavailable
from pipelinerl_common.stream import Stream
from pipelinerl_common.tracing import Tracer, span
from pipelinerl_common.types import SampleGroup

log = logging.getLogger(__name__)

_ASK_S = 2.0
"""Longest wait for leases in one call: within it the actor hears of cancels and renews its leases.
"""
_RENEW_S = 0.5
"""Pause between renewals while nothing is asked for."""
_AHEAD = 0.25
"""Share of the slots that is leased beyond them."""
_MAX_LEASES_PER_SLOT_GROUP = 4
"""Groups that are verified or published hold no slot; this bounds them, as a multiple of what fills
the slots.
"""
_FAILED_IN_A_ROW = 16
"""After so many failed groups without a good one in between, new ones are taken ever more slowly.
"""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 5.0
_END_S = 30.0
"""Longest time for cancelled groups to end."""
_FLUSH_S = 5.0
_KEEP_S = 10.0
"""Longest time for a group that was stopped to bring what it has sampled."""
_PUBLISH_S = 60.0


@dataclass(slots=True, eq=False)
class _Running:
    lease: pb.GroupLease
    progress: Progress
    began: float
    """Event loop's time of the lease."""
    task: asyncio.Task[None] | None = None
    ending: pb.GroupOutcome.ValueType | None = None
    """Set before the group is ended on purpose: what to report then."""
    keeps: bool = False
    """What it has sampled goes with that report."""
    stopped: bool = False


class RolloutLoop:
    """As many sequences as there are `slots` run at once on the generators; `group_size` of them
    make a group.
    """

    def __init__(
        self,
        desk: LeaseClient,
        reports: LeaseReports,
        roller: GroupRoller,
        stream: Stream,
        meter: RolloutMeter,
        slots: "Slots",
        tracer: Tracer,
    ) -> None:
        self._desk = desk
        self._reports = reports
        self._roller = roller
        self._stream = stream
        self._meter = meter
        self._slots = slots
        self._tracer = tracer
        self._running: dict[str, _Running] = {}
        self._changed = asyncio.Event()
        self._num_failed_in_a_row = 0
        self._beginning = FirstSuccessGuard()

    async def run(self, stop: asyncio.Event, drain_s: float) -> None:
        """Consumes leases, produces groups, waits for the preprocessor; ends when `stop` is set.

        A run that is done leaves it idle rather than ended: the trainer may go back to a
        checkpoint, or be given more steps. Asked to stop it takes nothing new, finishes what it can
        within `drain_s` seconds and hands back the rest. An error that no retry can help ends it,
        and with it every group.
        """
        async with asyncio.TaskGroup() as tasks:
            await self._lease_and_start(stop, tasks)
            await self._drain(drain_s)
            await self._end_all(pb.GROUP_OUTCOME_HANDED_BACK)
        await self._reports.flush(_FLUSH_S)

    async def _lease_and_start(self, stop: asyncio.Event, tasks: asyncio.TaskGroup) -> None:
        was_done = False
        while not stop.is_set():
            if not self._running and not self._slots.num_serving():
                await _stopped(
                    stop, _RENEW_S
                )  # to others this actor is not there: groups and shares are theirs
                continue
            wanted = self._slots.groups_wanted(
                [running.progress for running in self._running.values()]
            )
            response = await self._exchange(wanted)
            is_done = response.state == pb.RUN_STATE_DONE
            if is_done and not was_done:
                log.info("the run is done; waiting to be stopped, or for more")
            was_done = is_done
            for lease in response.leases:
                self._start(lease, response.served_version, tasks)
            if is_done:
                await _stopped(stop, _RENEW_S)
            elif not wanted:
                await self._wait_changed(_RENEW_S)
            elif self._num_failed_in_a_row > _FAILED_IN_A_ROW:
                await self._pause_after_failures(stop)

    async def _pause_after_failures(self, stop: asyncio.Event) -> None:
        """When nothing but failures comes, the task or what it needs is broken: prompts are not to
        be burnt at full speed.
        """
        pause_s = min(_FIRST_PAUSE_S * (self._num_failed_in_a_row - _FAILED_IN_A_ROW), _MAX_PAUSE_S)
        await _stopped(stop, pause_s)

    async def _exchange(self, wanted: int) -> pb.LeaseResponse:
        running = [
            lease_id for lease_id, running in self._running.items() if running.ending is None
        ]
        self._changed.clear()
        response = await self._desk.exchange(wanted, running, _ASK_S)
        self._beginning.serves(response.served_version)
        self._slots.limit = (
            response.max_trajectories if response.HasField("max_trajectories") else None
        )
        self._roller.limit(self._slots.limit)
        for lease_id in (
            running if response.state == pb.RUN_STATE_DONE else response.cancelled_lease_ids
        ):
            self._end(
                lease_id, pb.GROUP_OUTCOME_CANCELLED, keep=lease_id in response.recalled_lease_ids
            )
        return response

    def _start(self, lease: pb.GroupLease, served_version: int, tasks: asyncio.TaskGroup) -> None:
        began = asyncio.get_running_loop().time()
        running = _Running(lease, self._roller.begin(lease), began)
        self._running[lease.lease_id] = running
        oldest = running.progress.answers.oldest_version
        started = served_version if oldest is None else min(oldest, served_version)
        self._report(running, pb.GROUP_OUTCOME_STARTED, served_version=started)
        running.task = tasks.create_task(self._work(running), name=f"group {lease.group_id}")
        running.task.add_done_callback(lambda task: self._ended(running, task))

    def _ended(self, running: _Running, task: asyncio.Task[None]) -> None:
        """Not part of `_work`, since a task that is cancelled before its first step runs none of
        it.
        """
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
                group = await self._roller.roll_out(lease, running.progress)
                if running.ending == pb.GROUP_OUTCOME_CANCELLED:  # nobody would take it
                    raise GroupStopped(f"group {group.group_id} was complete when it was recalled")
                with span("publish", samples=len(group.samples)):
                    await self._publish(group, running)
        except GroupStopped:
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
                log.warning("group=%s waits to be published: %s", group.group_id, error)
        self._num_failed_in_a_row = 0
        self._beginning.succeeded()
        self._meter.published(len(group.samples), asyncio.get_running_loop().time() - running.began)

    def _failed(self, running: _Running, reason: str, error: PermanentError) -> None:
        self._num_failed_in_a_row += 1
        if self._num_failed_in_a_row == _FAILED_IN_A_ROW:
            log.error(
                "%d groups in a row failed, the last: reason=%s %s", _FAILED_IN_A_ROW, reason, error
            )
        self._meter.group_failed()
        self._report(running, pb.GROUP_OUTCOME_FAILED, reason=reason, detail=str(error)[:500])
        self._beginning.failed(running.lease.prompt_index, reason, str(error))

    def _report(
        self, running: _Running, outcome: pb.GroupOutcome.ValueType, **fields: object
    ) -> None:
        progress = running.progress
        partial = progress.answers.to_proto() if running.keeps else None
        wasted = (
            0 if outcome == pb.GROUP_OUTCOME_STARTED or partial is not None else progress.num_tokens
        )
        event = pb.GroupEvent(
            lease_id=running.lease.lease_id,
            outcome=outcome,
            tokens_wasted=wasted,
            partial=partial,
            **fields,  # type: ignore[arg-type]
        )
        self._reports.add(event)

    def _end(
        self, lease_id: str, outcome: pb.GroupOutcome.ValueType, *, keep: bool = False
    ) -> None:
        """Stops a group; with `keep`, its event brings what it has sampled, if it can go on from
        there.
        """
        running = self._running.get(lease_id)
        if running is None or running.ending is not None or running.task is None:
            return
        running.ending = outcome
        running.keeps = keep and self._roller.can_go_on
        if running.keeps:
            running.progress.stop.set()
            asyncio.get_running_loop().call_later(_KEEP_S, running.task.cancel)
        else:
            running.task.cancel()

    async def _drain(self, drain_s: float) -> None:
        log.info("draining: %d groups have %g s to finish", len(self._running), drain_s)
        deadline = asyncio.get_running_loop().time() + drain_s
        while self._running and (left_s := deadline - asyncio.get_running_loop().time()) > 0:
            try:
                async with asyncio.timeout(left_s):
                    await self._exchange(0)
                    await self._wait_changed(min(_RENEW_S, left_s))
            except TimeoutError:
                return

    async def _end_all(self, outcome: pb.GroupOutcome.ValueType) -> None:
        tasks = [running.task for running in self._running.values() if running.task is not None]
        for lease_id in tuple(self._running):
            self._end(lease_id, outcome, keep=True)
        if tasks:
            await asyncio.wait(tasks, timeout=_END_S)

    async def _wait_changed(self, timeout_s: float) -> None:
        """Until a group has ended, or `timeout_s` is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()


async def _stopped(stop: asyncio.Event, timeout_s: float) -> None:
    """Until `stop` is set, or `timeout_s` is over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await stop.wait()


@dataclass(slots=True)
class Slots:
    """How many groups fill the generators, or what the staleness policy lets run on them."""

    num_serving: Callable[[], int]
    """Sequences that the generators decode at once which serve at this moment."""
    group_size: int
    limit: int | None = None
    """Most trajectories to decode at once; None without a limit."""

    def groups_wanted(self, running: list[Progress]) -> int:
        """Groups to lease so that unsampled trajectories fill the slots and a quarter more.

        Example: 64 slots, groups of 8, running ones with 60 trajectories unsampled: 80 - 60 make
        room for 3 groups.
        """
        num_slots = (
            self.num_serving() if self.limit is None else min(self.num_serving(), self.limit)
        )
        target = math.ceil(num_slots * (1 + _AHEAD))
        unsampled = sum(progress.num_unsampled for progress in running)
        room = math.ceil((target - unsampled) / self.group_size)
        most = max(2, _MAX_LEASES_PER_SLOT_GROUP * math.ceil(target / self.group_size))
        return max(0, min(room, most - len(running)))
