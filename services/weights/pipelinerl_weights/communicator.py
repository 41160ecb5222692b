"""The communicator of a weight-transfer group: exchanges between pairs of ranks and a sum, over
gloo or NCCL, that a member can always leave.

What both implementations promise, and what the strict fake of the tests checks the callers for:

- **Nothing blocks.** Connecting is polled against a deadline and an abort; an operation is started
  and then polled. No call waits for a peer, so no thread can be stuck in one.
- **Abort is local.** `abort` gives up this rank's pending operations at once, whatever the others
  do. Everyone who learns that the group is aborted calls it, because a peer's abort does not end a
  kernel that spins on this rank's device.
- **No thread waits for an aborted operation**, and no watchdog ends the process because of one.

c10d's ProcessGroupNCCL promises none of these: it connects inside the first operation, keeps the
time limit of the group's forming for its whole life, and its watchdog ends the process a minute
after any peer's error. So NCCL is called directly (nccl.py), and gloo through c10d.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    Work,
)

from pipelinerl_weights.errors import TransferFailed, TransferTimeout
from pipelinerl_weights.store import GroupStore

_CONNECT_POLL_S = 0.002
_UNBOUNDED = timedelta(days=7)
"""c10d's own limit on operations. Deadlines are the group's; one of c10d's that passed would close
the connections of ranks that are only slow.
"""

Piece = tuple[Tensor, int]
"""A contiguous 1-d uint8 buffer on the communicator's device, and the peer's rank."""


class Operation(Protocol):
    """A started operation. Its buffers are in use until it is done or the communicator is
    aborted.
    """

    def is_done(self) -> bool:
        """Returns whether it has ended, without waiting. Raises TransferFailed when the library
        reports an error, as it does for everything that an abort gave up.
        """
        ...


class Communicator(Protocol):
    """The connections of one rank to all others of a group."""

    @property
    def transport(self) -> str:
        """What the connections run over, for the log. Example: "gloo on 10.0.0.7"."""
        ...

    def is_connected(self) -> bool:
        """Returns whether every rank has connected, without waiting. Raises TransferFailed."""
        ...

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> Operation:
        """Starts sends and receives as one group, so that their order cannot deadlock. Between two
        ranks, sends and receives match in the order in which they are started.
        """
        ...

    def broadcast(self, buffer: Tensor) -> Operation:
        """Starts to send rank 0's contiguous 1-d uint8 `buffer` into that of every other rank."""
        ...

    def all_reduce(self, values: Tensor) -> Operation:
        """Starts the sum over all ranks of int64 `values`, in place."""
        ...

    def abort(self) -> None:
        """Gives up every pending operation of this rank. Idempotent, from any thread, at once."""
        ...

    def destroy(self) -> None:
        """Aborts what is pending and frees the connections, without waiting for a peer."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """This rank's place in the group that connects."""

    rank: int
    world_size: int
    interface: str
    """This host's address towards the others."""
    device: torch.device
    """Where buffers are."""


Connector = Callable[[GroupStore, Place, float], Communicator]
"""Starts to connect and returns at once; the last argument is how many seconds it may take."""


def connect(
    connector: Connector,
    store: GroupStore,
    place: Place,
    deadline: float,
    raise_if_aborted: Callable[[], None],
) -> tuple[Communicator, float]:
    """Returns a communicator over which a sum over all ranks was made, and the seconds that this
    took. `deadline` is on time.monotonic's clock.

    Raises what `raise_if_aborted` raises, TransferTimeout or TransferFailed; nothing is left behind
    then.
    """
    began = time.monotonic()
    communicator = connector(store, place, deadline - began)
    try:
        # Polled, as a member that is lost now would keep a blocking call from ever returning.
        _poll(communicator.is_connected, "connect", deadline, raise_if_aborted)
        ones = torch.ones(1, dtype=torch.int64, device=place.device)
        proof = communicator.all_reduce(ones)
        _poll(proof.is_done, "answer a first sum", deadline, raise_if_aborted)
        if ones.item() != place.world_size:
            raise TransferFailed(f"a sum over {place.world_size} ranks gave {ones.item()}")
    except BaseException:
        communicator.destroy()
        raise
    return communicator, time.monotonic() - began


def _poll(
    is_done: Callable[[], bool], what: str, deadline: float, raise_if_aborted: Callable[[], None]
) -> None:
    while not is_done():
        raise_if_aborted()
        if time.monotonic() > deadline:
            raise TransferTimeout(f"the ranks did not {what} in time")
        time.sleep(_CONNECT_POLL_S)


def first_line(error: BaseException) -> str:
    """Returns what happened: c10d's messages carry a stack trace after the first line."""
    return str(error).partition("\n")[0].strip() or type(error).__name__


# gloo


@dataclass(slots=True, eq=False)
class _GlooOperation:
    """Works of one exchange, which the communicator's thread waits for."""

    works: list[Work] = field(default_factory=list)
    ended: bool = False
    error: str | None = None

    def is_done(self) -> bool:
        if self.error is not None:
            raise TransferFailed(self.error)
        return self.ended

    def wait(self) -> None:
        """Blocks until the works have ended."""
        try:
            for work in self.works:
                work.wait(_UNBOUNDED)
            self.ended = True
        except RuntimeError as error:
            self.error = f"gloo: {first_line(error)}"
        self.works.clear()


class GlooCommunicator:
    """Connections over gloo, for weights in host memory.

    c10d can neither poll a send nor wake a thread that waits for one, so a thread of the
    communicator's own makes the connections and waits for the operations in their order; callers
    look at what it found.
    """

    def __init__(self, store: GroupStore, place: Place, limit_s: float) -> None:
        self.transport = f"gloo on {place.interface}"
        self._place, self._limit = place, timedelta(seconds=max(1.0, limit_s))
        self._group: Any = None
        self._error: str | None = None
        self._lock = threading.Lock()
        self._aborted = False
        self._started: queue.SimpleQueue[_GlooOperation | None] = queue.SimpleQueue()
        scoped = store.scoped("gloo")
        threading.Thread(target=self._run, args=(scoped,), name="weights-gloo", daemon=True).start()

    def is_connected(self) -> bool:
        if self._error is not None:
            raise TransferFailed(self._error)
        return self._group is not None

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> Operation:
        with self._starting() as works:
            # Receives first: what a peer sends early then needs no buffer of gloo's.
            works.extend(self._group.recv([buffer], peer, 0) for buffer, peer in receives)
            works.extend(self._group.send([buffer], peer, 0) for buffer, peer in sends)
        return self._watch(works)

    def broadcast(self, buffer: Tensor) -> Operation:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, _UNBOUNDED
        with self._starting() as works:
            works.append(self._group.broadcast([buffer], options))
        return self._watch(works)

    def all_reduce(self, values: Tensor) -> Operation:
        options = AllreduceOptions()
        options.timeout = _UNBOUNDED
        with self._starting() as works:
            works.append(self._group.allreduce([values], options))
        return self._watch(works)

    def abort(self) -> None:
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
            group = self._group
        if group is not None and self._place.world_size > 1:
            # gloo ends everything that is pending, on both ends, when one wait of a connection
            # times out; so one is made that does, after a millisecond.
            nothing = torch.zeros(1, dtype=torch.uint8)
            with contextlib.suppress(RuntimeError):
                neighbour = (self._place.rank + 1) % self._place.world_size
                group.recv([nothing], neighbour, 1).wait(timedelta(milliseconds=1))

    def destroy(self) -> None:
        self.abort()
        self._started.put(None)
        self._group = None

    @contextlib.contextmanager
    def _starting(self) -> Any:
        works: list[Work] = []
        if self._aborted:
            raise TransferFailed("gloo: the communicator is aborted")
        try:
            yield works
        except RuntimeError as error:
            raise TransferFailed(f"gloo: {first_line(error)}") from error

    def _watch(self, works: list[Work]) -> Operation:
        operation = _GlooOperation(works)
        self._started.put(operation)
        return operation

    def _run(self, store: GroupStore) -> None:
        """Connects, then waits for operations until the communicator is destroyed."""
        c10d: Any = dist  # torch's type stubs leave out this class's options
        try:
            options = c10d.ProcessGroupGloo._Options()
            options._timeout = self._limit
            options._devices = [c10d.ProcessGroupGloo.create_device(hostname=self._place.interface)]
            group = c10d.ProcessGroupGloo(store, self._place.rank, self._place.world_size, options)
        except RuntimeError as error:
            self._error = f"gloo cannot connect: {first_line(error)}"
            return
        with self._lock:
            if self._aborted:  # no caller waits for it any more
                return
            self._group = group
        del group
        while (operation := self._started.get()) is not None:
            operation.wait()
