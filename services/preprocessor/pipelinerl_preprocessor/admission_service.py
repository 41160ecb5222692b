"""The Admission service: grants leases of groups to actors. Contract in admission.proto."""

import asyncio
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipelinerl.v1 import admission_pb2 as pb
from pipelinerl_common.errors import PermanentError, Unavailable
from pipelinerl_common.metrics import Counter
from pipelinerl_preprocessor.groups import DropReason, GroupLease
from pipelinerl_preprocessor.live import LiveLedger

log = logging.getLogger(__name__)

MAX_WAIT_S = 30.0
MAX_GROUPS_PER_CALL = 4096
MAX_LOADS_PER_CALL = 256


class ClosedTime:
    """Counts the time during which at least one actor asks for groups and the policy lets none
    start. The time before the first weights and after the end does not count.
    """

    def __init__(self, live: LiveLedger, seconds: Counter) -> None:
        self._live = live
        self._seconds = seconds
        self._num_refused = 0
        self._since = 0.0

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Counts the time inside as that of one more actor that waits for a group."""
        state = self._live.ledger.state
        if not state.publishing or state.done:
            yield
            return
        if self._num_refused == 0:
            self._since = self._live.now()
        self._num_refused += 1
        try:
            yield
        finally:
            self._num_refused -= 1
            self.count()

    def count(self) -> None:
        """Adds the time since the previous call, since a wait may be long."""
        now = self._live.now()
        self._seconds.inc(now - self._since if self._since else 0.0)
        self._since = now if self._num_refused else 0.0


class Admission:
    """The Admission service. Every lease is durable in the journal before it is answered."""

    def __init__(self, live: LiveLedger, group_size: int, closed: ClosedTime) -> None:
        self._live = live
        self._group_size = group_size
        self._closed = closed

    async def Lease(self, request: pb.LeaseRequest, context: Any) -> pb.LeaseResponse:
        """Answers with new leases, leases to cancel or the end of the run, at the latest after
        `wait_s`. Unblocked by `LiveLedger.changed`.
        """
        del context
        _check_actor(request.actor_id, request.session_id)
        check_range("max_groups", request.max_groups, MAX_GROUPS_PER_CALL)
        check_range("wait_s", request.wait_s, MAX_WAIT_S)
        live, ledger = self._live, self._live.ledger
        ledger.check_restored()
        await live.given_up(
            ledger.actor_seen(request.actor_id, request.session_id, live.now()), DropReason.EXPIRED
        )
        give_up_at = live.now() + (request.wait_s if request.max_groups else 0.0)
        while True:
            cancelled, leases = self._decide(request)
            left_s = give_up_at - live.now()
            if leases or cancelled or left_s <= 0 or ledger.state.done:
                break
            # Three times per lease, so that the leases of an actor that waits here are renewed.
            with self._closed.refusing():
                await live.admission_changed.wait(min(left_s, ledger.leases.lease_s / 3))
        if leases:
            self._begin_traces(leases)
            await self._make_durable(leases)
            live.counters.leases_granted.inc(len(leases))
        return pb.LeaseResponse(
            leases=[self._lease(lease) for lease in leases],
            cancelled_lease_ids=cancelled,
            served_version=ledger.state.served_version if ledger.state.publishing else -1,
            state=pb.RUN_STATE_DONE if ledger.state.done else pb.RUN_STATE_RUNNING,
            max_trajectories=ledger.trajectory_limit(request.actor_id),
        )

    async def Report(self, request: pb.ReportRequest, context: Any) -> pb.ReportResponse:
        """Takes events of leases and loads of generators. An event of a lease that has ended only
        counts its wasted tokens.
        """
        del context
        self._live.ledger.check_restored()
        if not request.actor_id:
            raise PermanentError("actor_id is empty: give the actor's name")
        if len(request.loads) > MAX_LOADS_PER_CALL:
            raise PermanentError(
                f"loads has {len(request.loads)} generators: at most {MAX_LOADS_PER_CALL} of one "
                "actor"
            )
        for load in request.loads:
            self._live.loads.add(request.actor_id, load, self._live.now())
        for event in request.events:
            await self._report(request.actor_id, event)
        return pb.ReportResponse()

    def _decide(self, request: pb.LeaseRequest) -> tuple[list[str], list[GroupLease]]:
        """Leases to cancel, and new ones. A session that was replaced during its call gets none."""
        live, ledger = self._live, self._live.ledger
        if not ledger.leases.sessions.is_current(request.actor_id, request.session_id):
            return list(request.running_lease_ids), []
        cancelled = ledger.leases.renew(request.actor_id, request.running_lease_ids, live.now())
        return cancelled, ledger.grant(
            request.actor_id, request.session_id, request.max_groups, live.now()
        )

    def _begin_traces(self, leases: list[GroupLease]) -> None:
        """Starts a trace for each group that has none; a group granted again keeps its trace."""
        for lease in leases:
            group = self._live.ledger.groups.get(lease.group_id)
            if group is not None and not group.traceparent:
                with self._live.tracer.sampled_root(
                    "grant", group=lease.group_id, prompt_index=lease.prompt_index
                ) as span:
                    group.traceparent = span.traceparent

    async def _make_durable(self, leases: list[GroupLease]) -> None:
        try:
            await self._live.journal.sync()
        except (asyncio.CancelledError, Unavailable):
            # The actor does not receive these leases, so they must not count as attempts.
            self._live.ledger.revoke(leases)
            raise

    def _lease(self, lease: GroupLease) -> pb.GroupLease:
        group = self._live.ledger.groups.get(lease.group_id)
        return pb.GroupLease(
            lease_id=lease.lease_id,
            group_id=lease.group_id,
            attempt=lease.attempt,
            prompt_index=lease.prompt_index,
            group_size=self._group_size,
            expires_in_s=self._live.ledger.leases.lease_s,
            partial=pb.PartialGroup.FromString(lease.partial) if lease.partial else None,
            traceparent=group.traceparent if group is not None else "",
        )

    async def _report(self, actor_id: str, event: pb.GroupEvent) -> None:
        live, ledger = self._live, self._live.ledger
        group = ledger.leases.held(actor_id, event.lease_id)
        if event.outcome == pb.GROUP_OUTCOME_STARTED:
            if 0 <= event.served_version <= ledger.state.num_committed + 1:
                ledger.started(actor_id, event.lease_id, event.served_version)
        elif event.outcome == pb.GROUP_OUTCOME_FAILED:
            if group is not None:
                log.warning(
                    "lease=%s failed reason=%s %s", event.lease_id, event.reason, event.detail
                )
                await live.drop(
                    group.group_id, event.reason or DropReason.FAILED, event.tokens_wasted
                )
        elif event.outcome == pb.GROUP_OUTCOME_HANDED_BACK:
            partial = event.partial.SerializeToString() if event.HasField("partial") else b""
            given_up = ledger.hand_back(actor_id, event.lease_id, partial)
            live.counters.wasted("handed_back", event.tokens_wasted)
            await live.given_up(given_up, DropReason.EXPIRED)
            live.changed()
        elif event.outcome == pb.GROUP_OUTCOME_CANCELLED:
            live.stopped(event.lease_id.rpartition(":")[0], event.tokens_wasted)
        else:
            raise PermanentError(
                f"outcome={event.outcome} of lease {event.lease_id!r} is not one of GroupOutcome"
            )


def _check_actor(actor_id: str, session_id: str) -> None:
    for name, value in (("actor_id", actor_id), ("session_id", session_id)):
        if not value or len(value) > 256:
            raise PermanentError(f"{name}={value[:40]!r} must have 1 to 256 characters")


def check_range(name: str, value: float, most: float) -> None:
    """Raises PermanentError for a field outside 0 to `most`."""
    if not (math.isfinite(value) and 0 <= value <= most):
        raise PermanentError(f"{name}={value} must be between 0 and {most:g}")
