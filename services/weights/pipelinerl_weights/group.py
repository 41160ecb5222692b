"""The weight-transfer group: trainer rank 0 as the sender (rank 0) and every generator worker as a
receiver.

It has a communicator of its own, beside any process group of torch's, and a small key-value store
of the sender's with these keys (below the epoch's prefix):

    joined/<rank>            the rank is ready to form the group
    receiving/<n>/<rank>     the rank is about to receive the n-th transfer, of the version in it
    checksum/<n>/<rank>      the checksum of what the rank received in the n-th transfer
    aborted                  a member aborted the group; the value says which and why

No thread ever blocks in an operation: waiting is a loop that polls the operation, the deadline and
the abort flag. The thread that sees the flag first on a rank aborts that rank's communicator, so
nothing stays pending, on the device or in the library, when a member is lost.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from pipelinerl_common.text import nouns
from pipelinerl_weights.communicator import (
    Communicator,
    Connector,
    GlooCommunicator,
    Operation,
    Place,
    connect,
    first_line,
)
from pipelinerl_weights.errors import TransferAborted, TransferFailed, TransferTimeout
from pipelinerl_weights.nccl import NcclCommunicator, on_transfer_stream
from pipelinerl_weights.rendezvous import (
    ABORTED,
    AbortFlag,
    Rendezvous,
    local_address,
    scope,
)
from pipelinerl_weights.store import GroupStore

__all__ = ["CONNECTORS", "Pending", "Rendezvous", "TransferGroup"]

log = logging.getLogger(__name__)

Result = TypeVar("Result")

CONNECTORS: Mapping[str, Connector] = {"gloo": GlooCommunicator, "nccl": NcclCommunicator}
"""Communicators by the name of `weightTransfer.backend`."""
_POLL_S = 0.0005
_STORE_POLL_S = 0.02


@dataclass(slots=True)
class Pending:
    """An operation under way; `wait` must be called, so that none stays pending unnoticed."""

    group: "TransferGroup"
    operation: Operation
    deadline: float
    what: str

    def wait(self) -> None:
        """Waits for the operation. Raises TransferAborted, TransferTimeout or TransferFailed, and
        then the group is aborted for every member.
        """
        self.group.finish(self)


class TransferGroup:
    """The weight-transfer group of one epoch. Every blocking call has a deadline; `abort` and
    `close` may be called from any thread.
    """

    def __init__(
        self, store: GroupStore, flag: AbortFlag, *, rank: int, world_size: int, timeout_s: float
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._store = store
        self._flag = flag
        self._communicator: Communicator | None = None
        self.device = torch.device("cpu")
        """Where the buffers of operations are."""
        self._rendezvous: Rendezvous | None = None
        self._num_transfers = 0
        flag.on_set = self._abort_communicator

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
        device: torch.device | str = "cpu",
    ) -> "TransferGroup":
        """Blocks until every rank has joined and a first sum over all of them was made. Rank 0
        passes its Rendezvous as `store`, which the group then owns.

        `timeout_s`: for forming, and afterwards for every operation without a deadline of its own.
        `device`: where nccl's buffers are; gloo's are in host memory. Raises TransferTimeout (names
        the missing ranks), TransferAborted or TransferFailed.
        """
        deadline = time.monotonic() + timeout_s
        host, port = (store.server.host, store.port) if store else (address, port)
        # The flag has a connection of its own: a suspended sender must not block it.
        scoped, watched = (
            GroupStore.connect(host, port, timeout_s, scope(epoch)) for _ in range(2)
        )
        flag = AbortFlag(watched, world_size)
        group = cls(scoped, flag, rank=rank, world_size=world_size, timeout_s=timeout_s)
        group._rendezvous = store
        on = torch.device("cpu" if backend == "gloo" else device)
        if on == torch.device("cuda"):  # without an index, which streams are asked for by
            on = torch.device("cuda", torch.cuda.current_device())
        place = Place(rank, world_size, local_address(address, port), on)
        group.device = on
        try:
            group._form(backend, place, deadline)
        except (TransferFailed, OSError) as error:
            group.abort(f"rank {rank} could not join: {error}")
            group.close()
            raise
        return group

    def _form(self, backend: str, place: Place, deadline: float) -> None:
        connector = CONNECTORS.get(backend)
        if connector is None:
            raise TransferFailed(
                f"unknown backend {backend!r}; known are {', '.join(sorted(CONNECTORS))}"
            )
        self._flag.arm()
        self._set(f"joined/{self.rank}", "1")
        self._wait_for("joined", range(self.world_size), deadline)
        # The seconds that are left count for connecting only: later operations have deadlines of
        # their own.
        with on_transfer_stream(place.device):
            self._communicator, seconds = connect(
                connector, self._store, place, deadline, self._flag.raise_if_set
            )
        log.info(
            "%d ranks connected over %s in %.2f s",
            self.world_size,
            self._communicator.transport,
            seconds,
        )
        # The flag may have been set between the last look and the assignment.
        if self._flag.reason is not None:
            self._abort_communicator()
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
        return self._start(
            lambda communicator: communicator.broadcast(buffer), "the broadcast", limit_s
        )

    def broadcast(self, buffer: Tensor, timeout_s: float | None = None) -> None:
        """`start_broadcast` and `wait` in one."""
        self.start_broadcast(buffer, timeout_s).wait()

    def gather_checksums(self, checksum: str, timeout_s: float) -> list[str]:
        """Ends a transfer and returns every rank's checksum on rank 0, nothing on the others. A
        dead peer is noticed here at the latest.
        """
        key = f"checksum/{self._num_transfers}"
        self._set(f"{key}/{self.rank}", checksum)
        # A sum rather than a wait for the keys: the library notices a peer that has died.
        ones = torch.ones(1, dtype=torch.int64, device=self.device)
        self._start(
            lambda communicator: communicator.all_reduce(ones), "the end of the transfer", timeout_s
        ).wait()
        self._flag.disarm()
        ranks = range(self.world_size) if self.rank == 0 else range(0)
        return [self._get(f"{key}/{rank}") for rank in ranks]

    def finish(self, pending: Pending) -> None:
        """Waits for an operation; see `Pending.wait`."""
        try:
            # Polled: a blocking wait of the library would not notice an abort.
            while not pending.operation.is_done():
                self._flag.raise_if_set()
                if time.monotonic() > pending.deadline:
                    raise TransferTimeout(f"{pending.what} did not end in time")
                time.sleep(_POLL_S)
        except TransferAborted:
            raise
        except TransferTimeout as error:
            self._fail(error)
        except TransferFailed as error:
            self._fail(TransferFailed(f"{pending.what} failed: {error}"), error)

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
        self._flag.set(reason, self._store)

    def close(self) -> None:
        """Leaves the group and frees it: peers that wait for this rank fail immediately.
        Idempotent.
        """
        self._flag.close()
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.destroy()
        self._store.close()
        if self._rendezvous is not None:
            self._rendezvous.close()

    def __enter__(self) -> "TransferGroup":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fail(self, error: TransferFailed, cause: BaseException | None = None) -> NoReturn:
        self._flag.raise_if_set()
        # A peer that aborts sets the flag in the store first, and then its operations with this
        # rank fail: its reason is the cause, although the flag's thread may not have read it yet.
        with contextlib.suppress(RuntimeError):
            if self._store.check([ABORTED]):
                self.abort(self._store.get(ABORTED).decode())
        self._flag.raise_if_set()
        self.abort(f"rank {self.rank}: {error}")
        raise error from cause

    # The store

    def _abort_communicator(self) -> None:
        communicator = self._communicator
        if communicator is not None:
            communicator.abort()

    def _start(
        self, start: Callable[[Communicator], Operation], what: str, limit_s: float
    ) -> Pending:
        self._flag.raise_if_set()
        communicator = self._communicator
        if communicator is None:
            raise TransferAborted("the group is closed")
        try:
            operation = start(communicator)
        except TransferFailed as error:
            self._fail(TransferFailed(f"{what} cannot start: {error}"), error)
        return Pending(self, operation, time.monotonic() + limit_s, what)

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
