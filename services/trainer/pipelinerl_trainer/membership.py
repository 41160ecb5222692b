"""Trainer rank 0's membership in the weight-transfer group, and the `Policy` service through which
the coordinator changes it and the trainer's other ranks follow.
"""

import asyncio
import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pipelinerl.v1 import policy_pb2, policy_pb2_grpc
from pipelinerl_common.errors import PermanentError, Refused, Unavailable
from pipelinerl_weights.errors import TransferFailed
from pipelinerl_weights.group import Rendezvous, TransferGroup

log = logging.getLogger(__name__)

FULL_NAME = "pipelinerl.v1.Policy"
BACKENDS = ("gloo", "nccl")
CALL_OFF_S = 5.0
"""Longest wait for an aborted forming to end."""
AWAIT_GROUP_S = 20.0
"""Longest time that AwaitGroup waits before it answers that there is no newer group."""


@dataclass(frozen=True, slots=True)
class GroupTerms:
    """The facts with which a rank joins the group of an epoch."""

    epoch: int
    world_size: int
    backend: str
    address: str
    port: int
    timeout_s: float


class Membership:
    """The trainer's one group, which is being formed, formed, or gone. A group of the trainer alone
    counts as formed.

    Lives in the event loop; joining blocks in a thread.
    """

    def __init__(
        self, advertised_address: str, device: torch.device | str = "cpu", num_ranks: int = 1
    ) -> None:
        """`device` is this rank's, from which nccl sends; `num_ranks` counts the trainer's ranks,
        which all join.
        """
        self._address = advertised_address
        self._device = device
        self._num_ranks = num_ranks
        self._terms: GroupTerms | None = None
        """The terms of the newest group that was opened."""
        self._opened = asyncio.Condition()
        self.on_change: Callable[[], None] = lambda: None
        """Called when a group has formed."""
        self._epoch = 0
        self._group: TransferGroup | None = None
        self._joining: asyncio.Task[None] | None = None
        self._forming: Rendezvous | None = None
        """The rendezvous of the group that is being formed."""
        self._is_alone = False

    @property
    def epoch(self) -> int:
        """The epoch of the group that the trainer is in or about to join; 0 for none, also after a
        transfer in it failed.
        """
        is_forming = self._joining is not None and not self._joining.done()
        return self._epoch if is_forming or self._is_alone or self.group is not None else 0

    @property
    def group(self) -> TransferGroup | None:
        """The formed group, if there is one that can be sent to."""
        return None if self._group is None or self._group.aborted is not None else self._group

    async def join(
        self, epoch: int, world_size: int, backend: str, port: int, timeout_s: float
    ) -> tuple[str, int]:
        """Opens the rendezvous and returns its address; the group forms in the background and
        replaces the old one, of which a running transfer or forming is aborted. Raises Refused or
        Unavailable.
        """
        if epoch <= self.epoch:
            raise Refused(f"epoch {epoch} is not newer than the current one, {self.epoch}")
        await self._leave(f"epoch {epoch} begins")
        # A request for a newer epoch may have come in while this one left the old group.
        if epoch <= self.epoch:
            raise Refused(f"epoch {epoch} was overtaken by epoch {self.epoch}")
        self._epoch, self._is_alone = epoch, world_size <= self._num_ranks
        if self._is_alone:
            log.info("epoch=%d no generators", epoch)
            return self._address, 0
        try:
            rendezvous = Rendezvous.open(self._address, port, world_size)
        except TransferFailed as error:
            raise Unavailable(str(error)) from error
        self._forming = rendezvous
        terms = GroupTerms(
            epoch, world_size, backend, rendezvous.address, rendezvous.port, timeout_s
        )
        self._joining = asyncio.create_task(self._join(rendezvous, terms), name=f"join {epoch}")
        async with self._opened:
            self._terms = terms
            self._opened.notify_all()
        return rendezvous.address, rendezvous.port

    async def newer_than(self, known_epoch: int, timeout_s: float) -> GroupTerms | None:
        """Returns the terms of the newest group once its epoch is newer than the known one, or None
        after `timeout_s`.
        """

        def newer() -> GroupTerms | None:
            terms = self._terms
            return terms if terms is not None and terms.epoch > known_epoch else None

        try:
            async with asyncio.timeout(timeout_s), self._opened:
                await self._opened.wait_for(lambda: newer() is not None)
        except TimeoutError:
            pass
        return newer()

    async def aclose(self) -> None:
        """Leaves the group; members that wait in it, or for it to form, fail immediately."""
        await self._leave("the trainer ends")

    async def _join(self, rendezvous: Rendezvous, terms: GroupTerms) -> None:
        epoch = terms.epoch
        join = partial(join_group, terms, 0, self._num_ranks, self._device, rendezvous)
        try:
            group = await asyncio.to_thread(join)
        except (TransferFailed, OSError) as error:
            log.warning("epoch=%d did not form: %s", epoch, error)
            # The frames hold the store, and with it the port that the next group needs.
            traceback.clear_frames(error.__traceback__)
            return
        finally:
            if self._forming is rendezvous:
                self._forming = None
        if epoch != self._epoch:  # a newer group was requested meanwhile
            group.close()
            return
        self._group = group
        log.info("epoch=%d world_size=%d joined", epoch, terms.world_size)
        self.on_change()

    async def _leave(self, reason: str) -> None:
        """Leaves the group, and ends a forming so that its port is free for the next one."""
        forming, joining, epoch = self._forming, self._joining, self._epoch
        group, self._group, self._is_alone, self._epoch = self._group, None, False, 0
        if group is not None:
            group.abort(reason)
            group.close()
        if forming is not None and joining is not None:
            # The join runs in a thread, which no cancellation reaches: only the abort ends it. One
            # that hangs even then must not keep the next group from forming.
            await asyncio.to_thread(forming.call_off, epoch, reason)
            await asyncio.wait({joining}, timeout=CALL_OFF_S)


def join_group(
    terms: GroupTerms,
    rank: int,
    num_ranks: int,
    device: torch.device | str,
    rendezvous: Rendezvous | None = None,
) -> TransferGroup:
    """Joins as `rank` of the trainer; blocks until all have joined. Raises TransferFailed or
    OSError.
    """
    return TransferGroup.join(
        terms.address,
        terms.port,
        rank=rank,
        world_size=terms.world_size,
        backend=terms.backend,
        epoch=terms.epoch,
        timeout_s=terms.timeout_s,
        store=rendezvous,
        device=device,
        num_senders=num_ranks,
    )


class PolicyServicer(policy_pb2_grpc.PolicyServicer):
    """The `Policy` service; answers Unavailable until `open`, when the model is loaded."""

    def __init__(self, membership: Membership, num_ranks: int = 1) -> None:
        self._membership = membership
        self._num_ranks = num_ranks
        self._policy_version: Callable[[], int] | None = None

    def open(self, policy_version: Callable[[], int]) -> None:
        """Begins to answer. `policy_version` returns the trainer's own version, which may be ahead
        of the published one.
        """
        self._policy_version = policy_version

    async def JoinGroup(
        self, request: policy_pb2.JoinGroupRequest, context: Any
    ) -> policy_pb2.JoinGroupResponse:
        _check(request)
        self._loaded()
        address, port = await self._membership.join(
            request.epoch, request.world_size, request.backend, request.port, request.timeout_s
        )
        return policy_pb2.JoinGroupResponse(master_address=address, master_port=port)

    async def AwaitGroup(
        self, request: policy_pb2.AwaitGroupRequest, context: Any
    ) -> policy_pb2.AwaitGroupResponse:
        terms = await self._membership.newer_than(request.known_epoch, AWAIT_GROUP_S)
        if terms is None:
            return policy_pb2.AwaitGroupResponse()
        return policy_pb2.AwaitGroupResponse(
            epoch=terms.epoch,
            world_size=terms.world_size,
            backend=terms.backend,
            master_address=terms.address,
            master_port=terms.port,
            timeout_s=terms.timeout_s,
        )

    async def GetPolicy(
        self, request: policy_pb2.GetPolicyRequest, context: Any
    ) -> policy_pb2.GetPolicyResponse:
        return policy_pb2.GetPolicyResponse(
            policy_version=self._loaded()(),
            epoch=self._membership.epoch,
            num_ranks=self._num_ranks,
        )

    def _loaded(self) -> Callable[[], int]:
        if self._policy_version is None:
            raise Unavailable("the trainer is still loading the model")
        return self._policy_version


def _check(request: policy_pb2.JoinGroupRequest) -> None:
    rules = {
        "epoch": (request.epoch >= 1, "at least 1"),
        "world_size": (request.world_size >= 1, "at least 1"),
        "backend": (request.backend in BACKENDS, f"one of {', '.join(BACKENDS)}"),
        "port": (request.port <= 65535, "at most 65535"),
        "timeout_s": (request.timeout_s > 0, "above 0"),
    }
    wrong = [
        f"{field}={getattr(request, field)!r} must be {rule}"
        for field, (is_right, rule) in rules.items()
        if not is_right
    ]
    if wrong:
        raise PermanentError("JoinGroup: " + "; ".join(wrong))
