"""The trainer's ranks: their process group, and how they agree.

DeepSpeed transports gradients and weights. Control messages are transported here, over gloo on the
host whatever the device is; they are small and never pickled.

With sequence parallelism consecutive ranks share their rows. Example: 4 ranks, 2 to a row: ranks 0
and 1 are data rank 0, ranks 2 and 3 data rank 1.
"""

import hashlib
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from pipelinerl_common.errors import FatalError
from pipelinerl_common.settings.roles import TrainerSettings
from pipelinerl_trainer.sequence_parallel import ALONE, SequenceGroup
from pipelinerl_weights.communicator import first_line

log = logging.getLogger(__name__)

CONTROL_TIMEOUT = timedelta(minutes=30)
"""Longest time that one rank waits for another's control message. Ranks wait in rounds of seconds;
the longest wait is a checkpoint on a slow disk, or a model that one of them still loads.
"""
_POLL_S, _REMIND_S = 0.2, 60.0
_ALL_JOINED = "joined"


class Vote(IntEnum):
    """A rank's vote in a round. When votes differ, the highest one decides."""

    READY = 0
    WAIT = 1
    AGAIN = 2
    """The batch under way was replaced: all ranks begin it again."""
    DONE = 3
    STOP = 4
    FAILED = 5


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """The coordinates of one rank, and where rank 0 listens."""

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    master_address: str = "127.0.0.1"
    master_port: int = 0
    sequence_size: int = 1
    """Ranks that share a row; `num_ranks` is a multiple of it."""

    @property
    def data_rank(self) -> int:
        """Which rows this rank trains, from 0."""
        return self.rank // self.sequence_size

    @property
    def num_data_ranks(self) -> int:
        return self.num_ranks // self.sequence_size


class Ranks:
    """Control collectives over all ranks. Every rank calls every method in the same order; with one
    rank nothing communicates.
    """

    def __init__(
        self,
        place: RankPlacement,
        device: torch.device,
        control: dist.ProcessGroup | None,
        sequence: SequenceGroup = ALONE,
        limit: timedelta = CONTROL_TIMEOUT,
    ) -> None:
        self.rank = place.rank
        self.num_ranks = place.num_ranks
        self.device = device
        self.sequence = sequence
        """The ranks that share their rows with this one."""
        self._control = control
        self._limit = limit

    def limit_collectives(self) -> None:
        """Gives the process groups that DeepSpeed has made the limit of the others: those get
        torch's own.
        """
        for group in list(c10d._world.pg_map):
            if group is not self._control:
                c10d._set_pg_timeout(self._limit, group)

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0, which commits, publishes and writes for all."""
        return self.rank == 0

    def gather(self, values: list[float]) -> Tensor:
        """Returns [num_ranks, len(values)] float64 on the host: row r has rank r's values."""
        mine = torch.tensor(values, dtype=torch.float64)
        if self.num_ranks == 1:
            return mine[None]
        rows = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        dist.all_gather(rows, mine, group=self._control)
        return torch.stack(rows)

    def from_leader(self, message: bytes) -> bytes:
        """Returns the leader's message on every rank; the others' arguments are ignored."""
        if self.num_ranks == 1:
            return message
        size = torch.tensor(len(message))
        dist.broadcast(size, 0, group=self._control)
        content = bytearray(message if self.is_leader else int(size))
        if content:
            dist.broadcast(torch.frombuffer(content, dtype=torch.uint8), 0, group=self._control)
        return bytes(content)

    def vote(self, vote: Vote, about: str = "") -> Vote:
        """Holds one round and returns the highest vote of all ranks. If all vote READY but not
        `about` the same thing, the outcome is WAIT: try again.
        """
        digest = hashlib.sha256(about.encode()).digest()
        fingerprint = [
            float(int.from_bytes(digest[start : start + 6], "big")) for start in (0, 6, 12)
        ]
        rows = self.gather([float(vote), *fingerprint])
        outcome = Vote(int(rows[:, 0].max()))
        if outcome is Vote.READY and bool((rows != rows[0]).any()):
            return Vote.WAIT
        return outcome


def cuda_index(local_rank: int) -> int:
    """Returns the index of this rank's device among those that the process sees: the only one, or
    the one of its place on the node.
    """
    count = torch.cuda.device_count()
    return local_rank % count if count else local_rank


def rank_device(place: RankPlacement) -> torch.device:
    """Returns the device that this rank computes on."""
    if torch.cuda.is_available():
        return torch.device("cuda", cuda_index(place.local_rank))
    return torch.device("cpu")


@contextmanager
def join_ranks(
    place: RankPlacement,
    settings: TrainerSettings = TrainerSettings(),  # noqa: B008 - frozen
) -> Iterator[Ranks]:
    """Forms the process group. Raises FatalError when the others do not join within
    `startupTimeoutSeconds`, and when one of them is lost inside the block.

    gloo detects a lost rank immediately; nccl, inside a collective, after
    `collectiveTimeoutSeconds`, unless the launcher or the operator, which see the process end, end
    all ranks before.
    """
    limit = timedelta(seconds=settings.collective_timeout_seconds)
    device = rank_device(place)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend,
            store=_store(place, settings.startup_timeout_seconds),
            rank=place.rank,
            world_size=place.num_ranks,
            timeout=limit,
        )
        control = (
            dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT) if place.num_ranks > 1 else None
        )
        sequence = _sequence_group(place, limit)
    except RuntimeError as error:
        where = f"{place.master_address}:{place.master_port}"
        raise FatalError(
            f"rank {place.rank} of {place.num_ranks} could not join the others at {where}: {error}"
        ) from error
    clean = False
    try:
        yield Ranks(place, device, control, sequence, limit)
        clean = True
    except RuntimeError as error:
        if not _is_lost_rank(error):
            raise
        where = f"rank {place.rank} of {place.num_ranks}"
        raise FatalError(
            f"{where}: another rank is lost, and its log says why: {first_line(error)}"
        ) from error
    finally:
        # Not after a failure: leaving could wait for a lost rank, and the process ends anyway.
        if clean or place.num_ranks == 1:
            _leave()


def _is_lost_rank(error: RuntimeError) -> bool:
    """Returns whether a collective failed, for which gloo has no error class of its own."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def _sequence_group(place: RankPlacement, limit: timedelta) -> SequenceGroup:
    if place.sequence_size == 1:
        return ALONE
    # Every rank makes the groups of all ranks, in the same order.
    process_group, _ = dist.new_subgroups(place.sequence_size, timeout=limit)  # type: ignore[no-untyped-call]
    return SequenceGroup(place.rank % place.sequence_size, place.sequence_size, process_group)


def _leave() -> None:
    """Destroys the process group, through DeepSpeed if it was used: it keeps groups of its own."""
    import deepspeed.comm

    if deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()
    else:
        dist.destroy_process_group()


def _store(place: RankPlacement, limit_s: float) -> Store:
    """Returns the store of the ranks once all have come. Raises FatalError that names those that
    have not within `limit_s`.
    """
    if place.num_ranks == 1:
        return HashStore()
    deadline = time.monotonic() + limit_s
    # Not TCPStore's own wait for the workers: it cannot say whom it waits for.
    store = TCPStore(
        place.master_address,
        place.master_port,
        place.num_ranks,
        is_master=place.rank == 0,
        timeout=timedelta(seconds=limit_s),
        wait_for_workers=False,
    )
    store.set(f"{_ALL_JOINED}/{place.rank}", "1")
    _wait_for_all(store, place, deadline)
    store.set_timeout(CONTROL_TIMEOUT)
    return store


def _wait_for_all(store: Store, place: RankPlacement, deadline: float) -> None:
    # Rank 0 looks for the others, and they look for what it found: with hundreds of ranks each
    # looking for all, the store would do little else.
    missing = list(range(place.num_ranks)) if place.rank == 0 else []
    remind_at = time.monotonic() + _REMIND_S
    while True:
        missing = [rank for rank in missing if not store.check([f"{_ALL_JOINED}/{rank}"])]
        if place.rank == 0 and not missing:
            store.set(_ALL_JOINED, "1")
        if store.check([_ALL_JOINED]):
            return
        late = f"ranks {', '.join(map(str, missing))}" if missing else "other ranks"
        now = time.monotonic()
        if now > deadline:
            raise FatalError(
                f"rank {place.rank} of {place.num_ranks}: {late} did not join in time: look for "
                "pods that are pending or still load, or raise trainers.startupTimeoutSeconds"
            )
        if now > remind_at:
            log.info("waiting for %s to join", late)
            remind_at = now + _REMIND_S
        time.sleep(_POLL_S)
