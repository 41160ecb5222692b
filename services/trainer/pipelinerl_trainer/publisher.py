"""Publication of weights to the generators, beside training.

training thread   offer(snapshot of version 7) ... offer(8) ... offer(9)       never waits
event loop        send 7 ........................ send 9 ...    9 replaced 8 while 7 was being sent
                  new epoch: send 9 again, so that new members catch up
                  failed: retry with backoff; training continues
beside it         MarkPublished(7), MarkPublished(9) at the preprocessor, retried until acknowledged
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pipelinerl.v1 import weights_pb2, weights_pb2_grpc
from pipelinerl_common import rpc
from pipelinerl_common.backoff import Backoff
from pipelinerl_common.errors import (
    FatalError,
    PermanentError,
    Refused,
    TemporaryError,
    Unavailable,
)
from pipelinerl_common.telemetry import fields
from pipelinerl_common.tracing import Tracer, span
from pipelinerl_trainer.event_loop import in_thread
from pipelinerl_trainer.membership import Membership
from pipelinerl_weights import agreement
from pipelinerl_weights.group import TransferGroup
from pipelinerl_weights.snapshot import WeightSnapshot
from pipelinerl_weights.transfer import SendReport, send_snapshot

log = logging.getLogger(__name__)

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 15.0
ANSWER_GRACE_S = 15.0
"""Time after an update's own deadline within which the coordinator still answers."""
PROBE_S = 5.0
WAKE_S = 30.0
"""Time that the sender's thread has to come back once its group is aborted."""
LOST_COORDINATOR_S = 10.0
"""Time that a transfer has left when the coordinator is lost."""


class NotYet(TemporaryError):
    """The group cannot be published to at this moment; nothing failed."""


@dataclass(frozen=True, slots=True)
class Offer:
    """This rank's share of one version's weights, ready to be sent."""

    snapshot: WeightSnapshot
    version: int


@dataclass(frozen=True, slots=True)
class PublisherStatus:
    """What metrics report about publication. Seconds and bytes are those of the newest successful
    update.
    """

    served_version: int = -1
    num_updates: int = 0
    num_failures: int = 0
    publish_s: float = 0.0
    """Time from PublishVersion to its answer."""
    pause_s: float = 0.0
    """The longest pause of a member."""
    transfer_s: float = 0.0
    apply_s: float = 0.0
    update_bytes: int = 0
    """Bytes of the manifest's tensors, which every generator received."""

    def values(self) -> dict[str, float]:
        """Returns gauges by name; times and bytes only after the first update."""
        newest = {
            "publish_seconds": self.publish_s,
            "pause_seconds": self.pause_s,
            "transfer_seconds": self.transfer_s,
            "apply_seconds": self.apply_s,
            "update_bytes": float(self.update_bytes),
        }
        return {
            "served_version": float(self.served_version),
            **(newest if self.num_updates else {}),
        }


class Publisher:
    """Sends the newest weights to the group, in rank 0's event loop. `wake` must be called when the
    membership changes.
    """

    def __init__(
        self,
        coordinator: rpc.Channel,
        mark_published: Callable[[int], Awaitable[None]],
        may_publish: Callable[[int], Awaitable[bool]],
        *,
        timeout_s: float,
        may_roll_back: bool,
    ) -> None:
        self._coordinator = weights_pb2_grpc.WeightTransferStub(coordinator)
        self._mark_published = mark_published
        self._may_publish = may_publish
        self._timeout_s = timeout_s
        self._may_roll_back = may_roll_back
        self._offer: Offer | None = None
        self._published: tuple[int, int] | None = None
        """Epoch and version of the last success."""
        self._backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
        self._wake = asyncio.Event()
        self._mark_wake = asyncio.Event()
        self._sending = asyncio.Lock()
        self.status = PublisherStatus()
        self.tracer = Tracer()
        self.on_status: Callable[[PublisherStatus], None] = lambda _: None
        self.wake_s = WAKE_S

    def offer(self, offer: Offer) -> None:
        """Sets the weights to publish from now on, in place of any older offer. Called in the event
        loop's thread.
        """
        self._offer = offer
        self.wake()

    def wake(self) -> None:
        """Ends any backoff, because the offer or the group changed."""
        self._backoff.reset()
        self._wake.set()

    async def run(self, membership: Membership) -> None:
        """Publishes and marks versions until cancelled.

        Consumes offers and newly formed groups, produces updates of the generators and
        MarkPublished calls, waits for the coordinator, and is unblocked by `wake` or a backoff.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._publish_all(membership), name="publish")
            tasks.create_task(self._mark_all(), name="mark published")

    async def finish(self, timeout_s: float) -> None:
        """Waits for a transfer that is under way, so that generators do not see it fail."""
        try:
            async with asyncio.timeout(timeout_s), self._sending:
                pass
        except TimeoutError:
            log.warning(
                "the weights of version %s were still being sent at the end",
                self._offer and self._offer.version,
            )

    async def _publish_all(self, membership: Membership) -> None:
        while True:
            # Cleared before the state is read: a change during the attempt ends the next wait.
            self._wake.clear()
            offer, group, epoch = self._offer, membership.group, membership.epoch
            if offer is None or group is None or self._published == (epoch, offer.version):
                await self._wake.wait()
                continue
            try:
                await self._check_allowed(offer, epoch)
                # `finish` waits for this lock, so that a stop does not cut a transfer off.
                async with self._sending:
                    await self._publish_newest(offer, group, epoch)
            except NotYet as error:
                log.debug("version=%d epoch=%d waits: %s", offer.version, epoch, error)
                await self._wait_before_retry()
            except (TemporaryError, Refused) as error:
                self._set_status(replace(self.status, num_failures=self.status.num_failures + 1))
                text = "version=%d epoch=%d not published, trying again: %s"
                log.warning(text, offer.version, epoch, error)
                await self._wait_before_retry()

    def _set_status(self, status: PublisherStatus) -> None:
        self.status = status
        self.on_status(status)

    async def _wait_before_retry(self) -> None:
        """Waits for the backoff delay or a wake-up, whichever comes first."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._backoff.next_delay()):
                await self._wake.wait()

    async def _publish_newest(self, offer: Offer, group: TransferGroup, epoch: int) -> None:
        await self._check_epoch(epoch)
        # Only the newest weights are worth a transfer: a newer offer may have come while the
        # coordinator was asked.
        if offer is self._offer:
            await self._check_ranks(offer, group)
            with self.tracer.root("weight update", version=offer.version, epoch=epoch):
                await self._publish(offer, group, epoch)

    async def _check_ranks(self, offer: Offer, group: TransferGroup) -> None:
        """Raises NotYet when another rank of the trainer has newer weights only: it keeps two
        versions, and this rank will soon offer the newer one.
        """
        if group.num_senders == 1:
            return
        propose = partial(agreement.propose, group, offer.version, PROBE_S)
        if not await in_thread(propose, "version proposal"):
            raise NotYet("another rank of the trainer is ahead")

    async def _publish(self, offer: Offer, group: TransferGroup, epoch: int) -> None:
        started = time.monotonic()
        is_first = self._published is None or self._published[0] != epoch
        request = weights_pb2.PublishVersionRequest(
            epoch=epoch,
            policy_version=offer.version,
            # The coordinator keeps the manifest for the rest of the epoch.
            manifest=offer.snapshot.manifest.to_proto() if is_first else None,
            allow_rollback=self._may_roll_back and is_first,
            timeout_s=self._timeout_s,
        )
        asking = asyncio.create_task(self._ask(request), name=f"PublishVersion {offer.version}")
        sending = asyncio.create_task(self._send(group, offer), name=f"send {offer.version}")
        try:
            response = await _both(asking, sending, group)
        finally:
            asking.cancel()
            # The sender waits in a thread, which cannot be cancelled: only an abort ends it.
            if not sending.done():
                group.abort("the trainer abandoned the update")
            await self._wait_for_end(asking, sending, offer.version)
        self._published = (epoch, offer.version)
        self._record(offer, response, time.monotonic() - started)

    async def _wait_for_end(
        self, asking: asyncio.Task[Any], sending: asyncio.Task[Any], version: int
    ) -> None:
        """Raises FatalError when the sender's thread does not come back."""
        _, stuck = await asyncio.wait({asking, sending}, timeout=self.wake_s)
        for task in (asking, sending):
            if task.done() and not task.cancelled():
                task.exception()  # retrieved: it was raised already, or is a consequence
        if sending in stuck:
            # It polls and never blocks, so it waits inside a driver or a library. No later version
            # could be sent; a new process can.
            raise FatalError(
                f"sending version {version} did not end {self.wake_s:g} s after its group was "
                "aborted: the device or its driver hangs"
            )

    async def _check_allowed(self, offer: Offer, epoch: int) -> None:
        """Raises NotYet while the staleness policy holds the version back. A new group gets it
        immediately, because its new members serve nothing yet.

        The deadline for a policy that never allows it is the preprocessor's.
        """
        if self._published is None or self._published[0] != epoch:
            return
        try:
            allowed = await self._may_publish(offer.version)
        except TemporaryError as error:
            # An unreachable preprocessor must not keep generators from the newest weights.
            log.debug("version=%d is published without permission: %s", offer.version, error)
            return
        if not allowed:
            self._backoff.reset()  # the question itself waits
            raise NotYet("the staleness policy holds it back")

    async def _check_epoch(self, epoch: int) -> None:
        """Raises NotYet when the coordinator is in another epoch: this group may be about to be
        replaced.
        """
        try:
            known = await rpc.call(
                self._coordinator.GetGroup, weights_pb2.GetGroupRequest(), timeout_s=PROBE_S
            )
        except Unavailable as error:
            raise NotYet(f"the coordinator is unreachable: {error}") from error
        if known.epoch != epoch:
            raise NotYet(f"the coordinator is in epoch {known.epoch}")

    async def _ask(
        self, request: weights_pb2.PublishVersionRequest
    ) -> weights_pb2.PublishVersionResponse:
        timeout_s = self._timeout_s + ANSWER_GRACE_S
        response = await rpc.call(self._coordinator.PublishVersion, request, timeout_s=timeout_s)
        if not response.published:
            members = (each for each in response.members if not each.ok)
            failed = "; ".join(f"{member.generator}: {member.error}" for member in members)
            raise TemporaryError(failed or "no member serves it")
        for member in response.members:
            if not member.ok:
                log.warning("generator=%s left the group: %s", member.generator, member.error)
        return response

    async def _send(self, group: TransferGroup, offer: Offer) -> SendReport:
        with span("send weights", bytes=offer.snapshot.num_bytes):
            send = partial(send_snapshot, group, offer.snapshot, offer.version, self._timeout_s)
            return await in_thread(send, "weights sender")

    def _record(
        self, offer: Offer, response: weights_pb2.PublishVersionResponse, seconds: float
    ) -> None:
        members = [member for member in response.members if member.ok]
        self._backoff.reset()
        self._set_status(
            replace(
                self.status,
                served_version=offer.version,
                num_updates=self.status.num_updates + 1,
                publish_s=seconds,
                pause_s=max((member.pause_s for member in members), default=0.0),
                transfer_s=max((member.transfer_s for member in members), default=0.0),
                apply_s=max((member.apply_s for member in members), default=0.0),
                update_bytes=offer.snapshot.manifest.num_bytes,
            )
        )
        self._mark_wake.set()
        log.info(
            "%s",
            fields(
                published_version=offer.version,
                generators=len(members),
                bytes=self.status.update_bytes,
                seconds=seconds,
                pause_seconds=self.status.pause_s,
                running=sum(member.num_running for member in members),
            ),
        )

    async def _mark_all(self) -> None:
        """Reports the served version to the preprocessor; retries until acknowledged. Versions that
        were overtaken meanwhile are skipped.
        """
        marked, backoff = -1, Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
        while True:
            await self._mark_wake.wait()
            self._mark_wake.clear()
            version = self.status.served_version
            if version == marked:
                continue
            try:
                await self._mark_published(version)
                marked = version
                backoff.reset()
            except (TemporaryError, PermanentError) as error:
                log.warning(
                    "version=%d could not be marked as published, trying again: %s", version, error
                )
                await backoff.sleep()
                self._mark_wake.set()


async def _both(
    asking: asyncio.Task[weights_pb2.PublishVersionResponse],
    sending: asyncio.Task[SendReport],
    group: TransferGroup,
) -> weights_pb2.PublishVersionResponse:
    """Returns the coordinator's answer once the transfer has ended too.

    When the coordinator refused, the transfer can never begin: the group is aborted. When the
    coordinator is lost, the members may still be receiving and get a grace time. When the transfer
    failed, the answer names the member that was the cause.
    """
    await asyncio.wait({asking, sending}, return_when=asyncio.FIRST_EXCEPTION)
    if asking.done() and asking.exception() is not None and not sending.done():
        if isinstance(asking.exception(), Unavailable):
            await asyncio.wait({sending}, timeout=LOST_COORDINATOR_S)
        group.abort(f"not published: {asking.exception()}")
    response = await asking
    await sending
    return response
