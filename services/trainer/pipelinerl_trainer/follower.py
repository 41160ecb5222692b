"""The part of the trainer's other ranks in publication: each joins rank 0's groups and sends its
own share of the version that rank 0 proposes.

rank 0      coordinator -> JoinGroup     propose version 7     send its share
others      AwaitGroup  -> join          answer: have it       send their shares, in a thread
"""

import asyncio
import logging
import time
from collections import deque
from functools import partial

import torch

from pipelinerl.v1 import policy_pb2, policy_pb2_grpc
from pipelinerl_common import rpc
from pipelinerl_common.backoff import Backoff
from pipelinerl_common.errors import FatalError, TemporaryError
from pipelinerl_trainer.event_loop import in_thread
from pipelinerl_trainer.membership import AWAIT_GROUP_S, GroupTerms, join_group
from pipelinerl_trainer.publisher import WAKE_S, Offer
from pipelinerl_trainer.ranks import RankPlacement
from pipelinerl_weights import agreement
from pipelinerl_weights.errors import TransferFailed
from pipelinerl_weights.group import TransferGroup
from pipelinerl_weights.transfer import send_snapshot

log = logging.getLogger(__name__)

KEPT_VERSIONS = 2
"""Ranks step together, so rank 0 proposes the newest version of this rank or the one before."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.2, 5.0
_LOOK_S = 0.5


class ShareSender:
    """Sends this rank's shares, in its event loop and a thread for each group."""

    def __init__(
        self, place: RankPlacement, device: torch.device, token: str | None, timeout_s: float
    ) -> None:
        """`timeout_s` is for one transfer."""
        self._place, self._device, self._timeout_s = place, device, timeout_s
        self._token = token
        self._leader: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._offers: deque[Offer] = deque(maxlen=KEPT_VERSIONS)
        self.wake_s = WAKE_S

    def offer(self, offer: Offer) -> None:
        """Keeps the newest weights, to be sent when rank 0 proposes them. Called in the event
        loop's thread.
        """
        self._offers.append(offer)

    def follow(self, leader: str) -> None:
        """Begins to join rank 0's groups; `leader` is the address of its Policy service. Called in
        the event loop's thread, when the ranks have met.
        """
        self._leader.set_result(leader)

    async def run(self) -> None:
        """Joins one group of rank 0's after the other and sends in it, until cancelled.

        Waits for rank 0, and is unblocked by a new group. Raises FatalError when a thread does not
        come back from an aborted group.
        """
        async with rpc.connect(await self._leader, token=self._token) as channel:
            await self._run(policy_pb2_grpc.PolicyStub(channel))

    async def _run(self, leader: "policy_pb2_grpc.PolicyAsyncStub") -> None:
        epoch, backoff = 0, Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
        while True:
            try:
                terms = await _newer_group(leader, epoch)
                if terms is None:
                    continue
                epoch = terms.epoch
                join = partial(
                    join_group, terms, self._place.rank, self._place.num_ranks, self._device
                )
                group = await in_thread(join, "join the weight-transfer group")
                backoff.reset()
                await self._send_in(group)
            except (TemporaryError, TransferFailed, OSError) as error:
                log.warning("rank=%d epoch=%d: %s", self._place.rank, epoch, error)
                # Rank 0 may be starting, or be about to open the next group.
                await backoff.sleep()

    async def _send_in(self, group: TransferGroup) -> None:
        """Sends until the group ends. Raises FatalError when the thread is stuck."""
        sending = asyncio.create_task(in_thread(partial(self._send_all, group), "share sender"))
        # Retrieved, also when this rank ends first: the abort that follows is no error of its own.
        sending.add_done_callback(lambda task: task.cancelled() or task.exception())
        aborted_at: float | None = None
        try:
            while not (await asyncio.wait({sending}, timeout=_LOOK_S))[0]:
                if group.aborted is not None and aborted_at is None:
                    aborted_at = time.monotonic()
                if aborted_at is not None and time.monotonic() - aborted_at > self.wake_s:
                    raise FatalError(
                        f"sending did not end {self.wake_s:g} s after the group was aborted: the "
                        "device or its driver hangs"
                    )
            sending.result()
        finally:
            group.close()

    def _send_all(self, group: TransferGroup) -> None:
        """Runs in the thread; ends with the group, whose abort wakes every wait in it."""
        while True:
            version = agreement.next_proposal(group)
            # Held by this thread while it is sent, whatever is offered meanwhile.
            offer = next((each for each in list(self._offers) if each.version == version), None)
            has_it = offer is not None
            is_agreed = agreement.answer(group, has_it=has_it, timeout_s=self._timeout_s)
            if is_agreed and offer is not None:
                report = send_snapshot(group, offer.snapshot, version, self._timeout_s)
                log.debug("version=%d bytes=%d sent", version, report.num_bytes)


async def _newer_group(leader: "policy_pb2_grpc.PolicyAsyncStub", epoch: int) -> GroupTerms | None:
    request = policy_pb2.AwaitGroupRequest(known_epoch=epoch)
    found = await rpc.call(leader.AwaitGroup, request, timeout_s=AWAIT_GROUP_S + 10.0)
    if not found.epoch:
        return None
    return GroupTerms(
        found.epoch,
        found.world_size,
        found.backend,
        found.master_address,
        found.master_port,
        found.timeout_s,
    )
