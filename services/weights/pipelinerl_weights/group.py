"""The weight-transfer group: trainer rank 0 as the sender (rank 0) and every generator worker as a
receiver.

It is a process group of torch's c10d beside any other group of the process; gloo and nccl differ
only in how it is made. Beside the collectives the sender holds a small key-value store with these
keys (below the epoch's prefix):

    joined/<rank>            the rank is ready to form the group
    receiving/<n>/<rank>     the rank is about to receive the n-th transfer, of the version in it
    aborted                  a member aborted the group; the value says which and why

c10d cannot wake a thread from a pending gloo collective. So no thread ever blocks in one: waiting
is a loop that polls the work, the deadline and the abort flag, and an abandoned collective stays
pending until its connections close.
"""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, GatherOptions, PrefixStore, Store, Work

from pipelinerl_common.text import nouns
from pipelinerl_weights.checksum import from_int64, to_int64
from pipelinerl_weights.errors import TransferAborted, TransferFailed, TransferTimeout
from pipelinerl_weights.rendezvous import (
    ABORTED,
    AbortFlag,
    Collectives,
    Rendezvous,
    connect_store,
    first_line,
    local_address,
    make_process_group,
    scope,
)

__all__ = ["Pending", "Rendezvous", "TransferGroup"]

Result = TypeVar("Result")

_POLL_S = 0.0005
_STORE_POLL_S = 0.02
_SLACK_S = 5.0
"""c10d's own time limit is this much longer than ours, so that a timeout is never mistaken for a
fault.
"""


@dataclass(slots=True)
class Pending:
    """A collective under way; `wait` must be called, so that none stays pending unnoticed."""

    group: "TransferGroup"
    work: Work
    deadline: float
    what: str

    def wait(self) -> None:
        """Waits for the collective. Raises TransferAborted, TransferTimeout or TransferFailed, and
        then the group is aborted for every member.
        """
        self.group.finish(self)


class TransferGroup:
    """The weight-transfer group of one epoch. Every blocking call has a deadline; `abort` and
    `close` may be called from any thread.
    """

    def __init__(
        self, store: Store, flag: AbortFlag, *, rank: int, world_size: int, timeout_s: float
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._store = store
        self._flag = flag
        self._process_group: Collectives | None = None
        self._rendezvous: Rendezvous | None = None
        self._num_transfers = 0
        self._abandoned: list[Pending] = []

    @classmethod
    def join(  # noqa: PLR0913 - the fields of /init_process_group
        cls,
        address: str,
        port: int,
        *,
        rank: int,
        world_size: int,
        backend: str,
        epoch: int,
        timeout_s: float,
        store: Rendezvous | None = None,
    ) -> "TransferGroup":
        """Blocks until every rank has joined. Rank 0 passes its Rendezvous as `store`, which the
        group then owns.

        `timeout_s`: for forming, and afterwards for every operation without a deadline of its own.
        Raises TransferTimeout (names the missing ranks), TransferAborted or TransferFailed.
        """
        deadline = time.monotonic() + timeout_s
        host, port = ("127.0.0.1", store.port) if store else (address, port)
        base = store.store if store and store.store else connect_store(host, port, timeout_s)
        flag = AbortFlag(
            PrefixStore(scope(epoch), connect_store(host, port, timeout_s)), world_size
        )
        scoped = PrefixStore(scope(epoch), base)
        group = cls(scoped, flag, rank=rank, world_size=world_size, timeout_s=timeout_s)
        group._rendezvous = store
        try:
            group._form(backend, local_address(address, port), deadline)
        except (TransferFailed, OSError) as error:
            group.abort(f"rank {rank} could not join: {error}")
            group.close()
            raise
        return group

    def _form(self, backend: str, interface: str, deadline: float) -> None:
        self._flag.arm()
        self._set(f"joined/{self.rank}", "1")
        self._wait_for("joined", range(self.world_size), deadline)
        remaining_s = max(1.0, deadline - time.monotonic())
        store = PrefixStore("c10d", self._store)
        self._process_group = make_process_group(
            backend,
            store,
            rank=self.rank,
            world_size=self.world_size,
            interface=interface,
            timeout_s=remaining_s,
        )
        self._flag.disarm()

    # One transfer: mark_receiving or wait_all_receiving, then broadcasts, then gather_checksums

    def mark_receiving(self, version: int) -> None:
        """Announces, on a receiver, that this rank is about to receive `version`."""
        self._flag.raise_if_set()
        self._flag.arm()
        self._num_transfers += 1
        self._set(f"receiving/{self._num_transfers}/{self.rank}", str(version))

    def wait_all_receiving(self, version: int, timeout_s: float) -> None:
        """Waits, on the sender, until every receiver is about to receive `version`. Raises as
        `Pending.wait` does.
        """
        self._flag.raise_if_set()
        self._flag.arm()
        self._num_transfers += 1
        key = f"receiving/{self._num_transfers}"
        # A receiver may have given up while the sender's flag was not armed.
        if self._has(ABORTED):
            self.abort(self._get(ABORTED))
            self._flag.raise_if_set()
        receivers = range(1, self.world_size)
        self._wait_for(key, receivers, time.monotonic() + timeout_s)
        for rank in receivers:
            expected = self._get(f"{key}/{rank}")
            if expected != str(version):
                self._fail(
                    TransferFailed(
                        f"rank {rank} expects version {expected}, but {version} is about to be sent"
                    )
                )

    def start_broadcast(self, buffer: Tensor, timeout_s: float | None = None) -> Pending:
        """Starts the broadcast of rank 0's contiguous `buffer` into that of every member. The
        buffer is in use until `wait` returns.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = (
            0,
            0,
            timedelta(seconds=limit_s + _SLACK_S),
        )
        try:
            work = self._collectives().broadcast([buffer], options)
        except RuntimeError as error:
            self._fail(TransferFailed(f"the broadcast cannot start: {first_line(error)}"), error)
        return Pending(self, work, time.monotonic() + limit_s, "the broadcast")

    def broadcast(self, buffer: Tensor, timeout_s: float | None = None) -> None:
        """`start_broadcast` and `wait` in one."""
        self.start_broadcast(buffer, timeout_s).wait()

    def gather_checksums(self, checksum: str, timeout_s: float, device: torch.device) -> list[str]:
        """Ends a transfer and returns every rank's checksum on rank 0, nothing on the others. A
        dead peer is noticed here at the latest.
        """
        mine = torch.tensor([to_int64(checksum)], dtype=torch.int64, device=device)
        gathered = (
            [torch.empty_like(mine) for _ in range(self.world_size)] if self.rank == 0 else []
        )
        options = GatherOptions()
        options.rootRank, options.timeout = 0, timedelta(seconds=timeout_s + _SLACK_S)
        try:
            work = self._collectives().gather([gathered] if gathered else [], [mine], options)
        except RuntimeError as error:
            self._fail(TransferFailed(f"the gather cannot start: {first_line(error)}"), error)
        Pending(self, work, time.monotonic() + timeout_s, "the exchange of checksums").wait()
        self._flag.disarm()
        return [from_int64(int(value.item())) for value in gathered]

    def finish(self, pending: Pending) -> None:
        """Waits for a collective; see `Pending.wait`."""
        # Polled: a blocking wait of the collective library would not notice an abort.
        while not pending.work.is_completed():
            if self._flag.reason is not None:
                self._abandoned.append(pending)
                raise TransferAborted(self._flag.reason)
            if time.monotonic() > pending.deadline:
                self._abandoned.append(pending)
                self._fail(TransferTimeout(f"{pending.what} did not end in time"))
            time.sleep(_POLL_S)
        try:
            pending.work.wait()
        except RuntimeError as error:
            self._flag.raise_if_set()
            self._fail(TransferFailed(f"{pending.what} failed: {first_line(error)}"), error)

    # Aborting and closing

    @property
    def aborted(self) -> str | None:
        """Why the group is aborted, or None."""
        return self._flag.reason

    def wait_aborted(self, seconds: float) -> bool:
        """Sleeps until an abort at the latest. Returns whether there was one."""
        deadline = time.monotonic() + seconds
        while self._flag.reason is None and (rest := deadline - time.monotonic()) > 0:
            time.sleep(min(rest, _STORE_POLL_S))
        return self._flag.reason is not None

    def abort(self, reason: str = "aborted") -> None:
        """Aborts the group for every member: waiting and later calls raise TransferAborted, here
        and in the other processes.
        """
        if not self._flag.set(reason, self._store):
            return
        process_group = self._process_group
        if process_group is not None and process_group.name() == "nccl":
            # Frees the kernels that wait on the device; gloo has none.
            process_group.abort()

    def close(self) -> None:
        """Leaves the group and frees it: peers that wait for this rank fail immediately.
        Idempotent.
        """
        self._flag.close()
        process_group, self._process_group = self._process_group, None
        pending = [item.work for item in self._abandoned if not item.work.is_completed()]
        self._abandoned = []
        if process_group is not None and pending:
            # Destroying a gloo group blocks while a collective is pending, which ends when the
            # peers close or at its timeout: a thread of its own waits for that.
            threading.Thread(
                target=_bury, args=([process_group], pending), name="weights-bury", daemon=True
            ).start()
        del process_group
        if self._rendezvous is not None:
            self._rendezvous.close()

    def __enter__(self) -> "TransferGroup":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fail(self, error: TransferFailed, cause: BaseException | None = None) -> NoReturn:
        self._flag.raise_if_set()
        self.abort(f"rank {self.rank}: {error}")
        raise error from cause

    # The store

    def _collectives(self) -> Collectives:
        self._flag.raise_if_set()
        process_group = self._process_group
        if process_group is None:
            raise TransferAborted("the group is closed")
        return process_group

    def _set(self, key: str, value: str) -> None:
        self._ask_store(lambda: self._store.set(key, value))

    def _get(self, key: str) -> str:
        return self._ask_store(lambda: self._store.get(key).decode())

    def _has(self, key: str) -> bool:
        return self._ask_store(lambda: self._store.check([key]))

    def _ask_store(self, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except RuntimeError as error:
            failure = TransferFailed(f"the sender's store does not answer: {first_line(error)}")
            self._fail(failure, error)

    def _wait_for(self, key: str, ranks: Iterable[int], deadline: float) -> None:
        """Waits for `<key>/<rank>` of every rank, at growing intervals."""
        missing = list(ranks)
        poll_s = _POLL_S
        while True:
            self._flag.raise_if_set()
            while missing and self._has(f"{key}/{missing[-1]}"):
                missing.pop()
            if not missing:
                return
            if time.monotonic() > deadline:
                missing = [rank for rank in missing if not self._has(f"{key}/{rank}")]
                what = "join" if key == "joined" else "get ready to receive"
                late = f"{nouns(len(missing), 'rank')} {', '.join(map(str, missing))}"
                self._fail(TransferTimeout(f"{late} did not {what} in time"))
            time.sleep(poll_s)
            poll_s = min(_STORE_POLL_S, 1.5 * poll_s)


def _bury(process_group: list[Collectives], pending: list[Work]) -> None:
    while any(not work.is_completed() for work in pending):
        time.sleep(_STORE_POLL_S)
    process_group.clear()
