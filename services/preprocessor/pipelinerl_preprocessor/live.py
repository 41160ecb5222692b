"""The ledger at work, shared by all services of this process: with its payloads, its journal and
its clock; the ring buffer of finished groups, the gate of publishes, the wake-ups of waiting calls.

All of it runs on one event loop, so nothing changes between two awaits of a coroutine.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from pipelinerl_common.stream import ReceivedGroup
from pipelinerl_common.tracing import Tracer
from pipelinerl_preprocessor.groups import UNARRIVED, DropReason, GroupState, split_group_id
from pipelinerl_preprocessor.journal import JournalWriter
from pipelinerl_preprocessor.ledger import Ledger
from pipelinerl_preprocessor.metrics import EngineLoads, PreprocessorCounters
from pipelinerl_preprocessor.preparation import PreparedGroup
from pipelinerl_staleness.policy import EngineLoad

log = logging.getLogger(__name__)

_MAX_ENDED = 4096


class Broadcast:
    """A condition without memory: `notify` wakes every call that waits now."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float) -> bool:
        """False when there was no `notify` within `timeout_s`."""
        # Read before any suspension, so that a `notify` after this call is not missed.
        event = self._event
        if timeout_s <= 0:
            return False
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return False
        return True


class RingBuffer:
    """The finished groups that wait for training, by id, in the order of finishing. It is bounded
    and evicts the oldest.

    Example with room for two: add a, b, c; `add` of c returns a, which is no longer inside.
    """

    def __init__(self, max_groups: int) -> None:
        if max_groups < 1:
            raise ValueError(f"max_groups={max_groups} must be at least 1")
        self.max_groups = max_groups
        self._waiting: dict[str, None] = {}

    def add(self, group_id: str) -> str | None:
        """Returns the oldest group when it was evicted; the caller counts it and frees its slot."""
        self._waiting[group_id] = None
        if len(self._waiting) <= self.max_groups:
            return None
        oldest = next(iter(self._waiting))
        del self._waiting[oldest]
        return oldest

    def discard(self, group_id: str) -> None:
        self._waiting.pop(group_id, None)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, group_id: object) -> bool:
        return group_id in self._waiting


class PublishGate:
    """Decides whether finished weights may go to the generators. A policy may hold a version back,
    for `max_hold_s` at most; once allowed, it stays allowed.

    As in the simulator, the next batch is not taken before the newest weights may go.
    """

    def __init__(self, ledger: Ledger, max_hold_s: float, now: Callable[[], float]) -> None:
        self._ledger = ledger
        self._max_hold_s = max_hold_s
        self._now = now
        self._allowed = -1
        self._held: tuple[int, float] | None = None
        self.num_forced = 0
        """Versions that the policy still held back at their deadline."""

    def may_publish(self, version: int) -> bool:
        """Whether `version` may go now; always true for a served or an allowed one."""
        if version <= max(self._allowed, self._ledger.state.served_version):
            return True
        if not self._ledger.policy.may_publish():
            if self._held is None or self._held[0] != version:
                self._held = (version, self._now())
            if self._now() - self._held[1] < self._max_hold_s:
                return False
            log.warning(
                "version=%d was held back for %g s, it is published now", version, self._max_hold_s
            )
            self.num_forced += 1
        self._allowed, self._held = version, None
        return True

    def holds_back(self) -> bool:
        """Whether the newest step's weights are wanted on the generators and may not go yet."""
        step = self._ledger.state.num_committed
        return (
            step > 0
            and self._ledger.policy.publishes_after(step - 1)
            and not self.may_publish(step)
        )

    def rewind(self) -> None:
        """Forgets what was allowed, since versions restart at an older one."""
        self._allowed, self._held = -1, None


@dataclass(slots=True)
class LiveLedger:
    """The ledger with what the services need beside it. `received` holds the messages that are not
    acknowledged yet, by group: arrived, ready and taken ones; `prepared` the latter two.
    """

    ledger: Ledger
    journal: JournalWriter
    waiting: RingBuffer
    gate: PublishGate
    counters: PreprocessorCounters
    note: Callable[[str, list[Any]], None] = lambda what, values: None
    """Writes a note for `pipelinerl simulate` beside the policy's events."""
    loads: EngineLoads = field(default_factory=EngineLoads)
    tracer: Tracer = field(default_factory=Tracer)
    now: Callable[[], float] = time.monotonic
    received: dict[str, ReceivedGroup] = field(default_factory=dict)
    prepared: dict[str, PreparedGroup] = field(default_factory=dict)
    admission_changed: Broadcast = field(default_factory=Broadcast)
    """Notified when a lease may be granted or must be cancelled."""
    batch_changed: Broadcast = field(default_factory=Broadcast)
    """Notified when a batch may be formed."""
    ended: dict[str, str] = field(default_factory=dict)
    """The reasons for which the newest groups were given up while an actor worked on them, until
    the actor reports their tokens.
    """

    def changed(self, *, leases_ended: bool = False) -> None:
        """Wakes the waiting calls that may now be answered."""
        self.batch_changed.notify()
        # Actors may be thousands: they are woken only for a lease to start or to cancel.
        if leases_ended or self.ledger.may_grant():
            self.admission_changed.notify()

    async def observe(self, load: EngineLoad) -> None:
        """A load report for the policy, which may give groups up on it."""
        if self.ledger.restored:
            await self.given_up(self.ledger.observe(load), DropReason.CANCELLED)
            self.changed()

    async def finish(self, prepared: PreparedGroup) -> None:
        """A group passed every check and waits to be taken."""
        received = self.received.get(prepared.group_id)
        if received is None:  # void since a restore, and counted there
            return
        runs = [sample.version_runs for sample in received.group.samples if sample.version_runs]
        self.ledger.ready(
            prepared.group_id,
            [run[0].policy_version for run in runs],
            [run[-1].policy_version for run in runs],
        )
        self.prepared[prepared.group_id] = prepared
        await self.wait_for_training(prepared.group_id)

    async def wait_for_training(self, group_id: str) -> None:
        """Puts a ready group into the ring buffer and drops the one that it evicts."""
        overflown = self.waiting.add(group_id)
        if overflown is not None:
            await self.drop(overflown, DropReason.RING_BUFFER)
        self.changed()

    async def return_untrained(self) -> None:
        """Returns groups of a batch that was not committed to the ring buffer."""
        for group in self.ledger.groups.within(GroupState.READY):
            if group.group_id not in self.waiting:
                await self.wait_for_training(group.group_id)

    async def drop(self, group_id: str, reason: str, num_wasted: int = 0) -> None:
        """Ends an outstanding group untrained and frees its slot."""
        if self.ledger.drop(group_id):
            await self.given_up([group_id], reason, num_wasted)

    async def given_up(self, group_ids: Iterable[str], reason: str, num_wasted: int = 0) -> None:
        """Counts groups that have left the ledger untrained and releases their messages."""
        ended = list(group_ids)
        for group_id in ended:
            received = self.received.get(group_id)
            num_tokens = num_wasted if received is None else received.group.num_sampled
            num_samples = 0 if received is None else len(received.group.samples)
            if received is None:
                self.ended[group_id] = reason
                if len(self.ended) > _MAX_ENDED:
                    del self.ended[next(iter(self.ended))]
            self.counters.dropped(reason, num_tokens, num_samples)
            log.info("dropped group=%s reason=%s tokens=%d", group_id, reason, num_tokens)
        await self.release(ended)
        if ended:
            self.changed(leases_ended=True)

    def stopped(self, group_id: str, num_wasted: int) -> None:
        """An actor stopped a group: its tokens are counted under the group's reason, unless the
        group's message has arrived.
        """
        reason = self.ended.pop(group_id, None) or self._reason_stopped(group_id)
        if reason is not None:
            self.counters.wasted(reason, num_wasted)

    def _reason_stopped(self, group_id: str) -> str | None:
        """None for a group that its actor had to stop because another attempt has arrived."""
        identity, group = split_group_id(group_id), self.ledger.groups.get(group_id)
        if identity is not None and identity[0] < self.ledger.state.incarnation:
            return DropReason.ROLLBACK
        return DropReason.UNFINISHED if group is not None and group.state in UNARRIVED else None

    async def release(self, group_ids: Iterable[str]) -> None:
        """Acknowledges the messages of groups that have ended and frees their memory."""
        for group_id in group_ids:
            self.prepared.pop(group_id, None)
            self.waiting.discard(group_id)
            received = self.received.pop(group_id, None)
            if received is not None:
                await received.ack()
