"""The weight-transfer group: the trainer's ranks as senders (the first ranks) and every generator
worker as a receiver.

It has a communicator of its own, beside any process group of torch's, and a small key-value store
of rank 0's, below the epoch's prefix. Its keys here:

    joined/<rank>            the rank is ready to form the group; the value is its host
    receiving/<n>/<rank>     the rank is about to receive the n-th transfer, of the version in it
    aborted                  a member aborted the group; the value says which and why

What the members agree on for a transfer (agreement.py) is in the store too.

No thread ever blocks in an operation: waiting is a loop that polls the operation, the deadline and
the abort flag. The thread that sees the flag first on a rank aborts that rank's communicator, so
nothing stays pending, on the device or in the library, when a member is lost.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import torch

from pipelinerl_common.text import nouns
from pipelinerl_weights.communicator import (
    Communicator,
    Connector,
    GlooCommunicator,
    Operation,
    Piece,
    Place,
    connect,
    first_line,
)
from pipelinerl_weights.errors import TransferAborted, TransferFailed, TransferTimeout
from pipelinerl_weights.nccl import NcclCommunicator, on_transfer_stream
from pipelinerl_weights.plan import PlanPart
from pipelinerl_weights.rendezvous import (
    ABORTED,
    AbortFlag,
    Rendezvous,
    host_identity,
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
_LONGEST_POLL_S = 0.004
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
        self,
        store: GroupStore,
        flag: AbortFlag,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        num_senders: int = 1,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.num_senders = num_senders
        """Ranks of the trainer, which are the first ones; only they need to know it."""
        self.timeout_s = timeout_s
        self._store = store
        self._flag = flag
        self._communicator: Communicator | None = None
        self.device = torch.device("cpu")
        """Where the buffers of operations are."""
        self._rendezvous: Rendezvous | None = None
        self.num_transfers = 0
        """Transfers that this rank has begun."""
        self.num_proposals = 0
        """Versions that rank 0 has proposed to the trainer's other ranks."""
        self.parts: dict[str, PlanPart] = {}
        """This rank's part of the slice plan, by the hash of its manifest."""
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
        num_senders: int = 1,
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
        group = cls(
            scoped,
            flag,
            rank=rank,
            world_size=world_size,
            timeout_s=timeout_s,
            num_senders=num_senders,
        )
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
        self.post(f"joined/{self.rank}", host_identity())
        self.wait_for_ranks("joined", range(self.world_size), deadline, "join")
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

    # One transfer: begin on every rank, exchanges, end_transfer

    def begin_transfer(self) -> None:
        """Counts the transfer that this rank takes part in, and watches for an abort."""
        self._flag.raise_if_set()
        self._flag.arm()
        self.num_transfers += 1

    def mark_receiving(self, version: int) -> None:
        """Announces, on a receiver, that this rank is about to receive `version`."""
        self.begin_transfer()
        self.post(f"receiving/{self.num_transfers}/{self.rank}", str(version))

    def wait_all_receiving(self, version: int, timeout_s: float) -> None:
        """Waits, on rank 0, until every receiver is about to receive `version`. Raises as
        `Pending.wait` does.
        """
        self.begin_transfer()
        key = f"receiving/{self.num_transfers}"
        # A receiver may have given up while the sender's flag was not armed.
        if self.has(ABORTED):
            self.abort(self.read(ABORTED).decode())
            self._flag.raise_if_set()
        receivers = range(self.num_senders, self.world_size)
        deadline = time.monotonic() + timeout_s
        self.wait_for_ranks(key, receivers, deadline, "get ready to receive")
        for rank in receivers:
            expected = self.read(f"{key}/{rank}").decode()
            if expected != str(version):
                self.fail(
                    TransferFailed(
                        f"rank {rank} expects version {expected}, but {version} is about to be sent"
                    )
                )

    def start_exchange(
        self, sends: Sequence[Piece], receives: Sequence[Piece], timeout_s: float
    ) -> Pending:
        """Starts sends to and receives from other ranks as one group. The buffers are in use until
        `wait` returns.
        """
        return self._start(
            lambda communicator: communicator.exchange(sends, receives), "the exchange", timeout_s
        )

    def end_transfer(self, timeout_s: float) -> None:
        """Waits until every rank has ended the transfer. A dead peer is noticed here at the
        latest.
        """
        # A sum rather than a wait for keys: the library notices a peer that has died.
        ones = torch.ones(1, dtype=torch.int64, device=self.device)
        self._start(
            lambda communicator: communicator.all_reduce(ones), "the end of the transfer", timeout_s
        ).wait()
        self._flag.disarm()

    def finish(self, pending: Pending) -> None:
        """Waits for an operation; see `Pending.wait`."""
        try:
            # Polled: a blocking wait of the library would not notice an abort. Ever more rarely,
            # since many ranks of a host wait at the same time.
            poll_s = _POLL_S
            while not pending.operation.is_done():
                self._flag.raise_if_set()
                if time.monotonic() > pending.deadline:
                    raise TransferTimeout(f"{pending.what} did not end in time")
                time.sleep(poll_s)
                poll_s = min(_LONGEST_POLL_S, 1.5 * poll_s)
        except TransferAborted:
            raise
        except TransferTimeout as error:
            self.fail(error)
        except TransferFailed as error:
            self.fail(TransferFailed(f"{pending.what} failed: {error}"), error)

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

    def fail(self, error: TransferFailed, cause: BaseException | None = None) -> NoReturn:
        """Aborts the group for every member and raises `error`, or why it was aborted before."""
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
            self.fail(TransferFailed(f"{what} cannot start: {error}"), error)
        return Pending(self, operation, time.monotonic() + limit_s, what)

    def post(self, key: str, value: str | bytes) -> None:
        """Sets a key of the store for every member."""
        self._ask_store(lambda: self._store.set(key, value))

    def read(self, key: str) -> bytes:
        """Returns the value of a key that a member has set."""
        return self._ask_store(lambda: self._store.get(key))

    def has(self, key: str) -> bool:
        """Returns whether a member has set the key."""
        return self._ask_store(lambda: self._store.check([key]))

    def _ask_store(self, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except RuntimeError as error:
            failure = TransferFailed(f"the sender's store does not answer: {first_line(error)}")
            self.fail(failure, error)

    def wait_for(
        self, key: str, deadline: float, what: str, longest_poll_s: float = _STORE_POLL_S
    ) -> bytes:
        """Waits until a member has set the key and returns its value; `what` is for the error."""
        # An abort ends the wait even between two transfers.
        self._flag.arm()
        poll_s = _POLL_S
        while not self.has(key):
            self._flag.raise_if_set()
            if time.monotonic() > deadline:
                self.fail(TransferTimeout(f"{what} did not come in time"))
            time.sleep(poll_s)
            poll_s = min(longest_poll_s, 1.5 * poll_s)
        return self.read(key)

    def wait_for_ranks(self, key: str, ranks: Iterable[int], deadline: float, what: str) -> None:
        """Waits for `<key>/<rank>` of every rank, at growing intervals. The error names the ranks
        that did not do `what`.
        """
        missing = list(ranks)
        poll_s = _POLL_S
        while True:
            self._flag.raise_if_set()
            while missing and self.has(f"{key}/{missing[-1]}"):
                missing.pop()
            if not missing:
                return
            if time.monotonic() > deadline:
                missing = [rank for rank in missing if not self.has(f"{key}/{rank}")]
                late = f"{nouns(len(missing), 'rank')} {', '.join(map(str, missing))}"
                self.fail(TransferTimeout(f"{late} did not {what} in time"))
            time.sleep(poll_s)
            poll_s = min(_STORE_POLL_S, 1.5 * poll_s)
