"""Where a group's members meet, how its process group is made for gloo and for nccl, and the flag
that aborts it for every member within a fraction of a second.
"""

import contextlib
import socket
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, cast

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    BroadcastOptions,
    GatherOptions,
    PrefixStore,
    Store,
    TCPStore,
    Work,
)

from pipelinerl_weights.errors import TransferAborted, TransferFailed, TransferTimeout

ABORTED = "aborted"
"""Key of the abort flag in the store; its value is the reason."""
_POLL_S = 0.05
_MEMBERS_PER_POLL = 64
"""With more members than this each polls less often, so that the sender's store is not flooded."""
_LOCAL_S = 2.0
"""Longest time to reach the store of this process."""


class AbortFlag:
    """The abort key of the group's store, mirrored in this process by a thread that polls it while
    a transfer is under way.

    The thread has a connection of its own: a suspended sender blocks this thread and no other.
    """

    def __init__(self, store: Store, world_size: int) -> None:
        self._store = store
        self._poll_s = _POLL_S * max(1.0, world_size / _MEMBERS_PER_POLL)
        self._reason: str | None = None
        self._armed = threading.Event()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="weights-abort-flag", daemon=True)
        self._thread.start()

    @property
    def reason(self) -> str | None:
        """Why the group is aborted, or None."""
        return self._reason

    def raise_if_set(self) -> None:
        if self._reason is not None:
            raise TransferAborted(self._reason)

    def arm(self) -> None:
        """Starts polling, because a transfer begins."""
        self._armed.set()

    def disarm(self) -> None:
        """Stops polling, because the transfer has ended."""
        if not self._closed.is_set():
            self._armed.clear()

    def set(self, reason: str, store: Store) -> bool:
        """Aborts the group for every member, over `store`, the caller's connection. Returns False
        if it was aborted before.
        """
        if not self._set_here(reason):
            return False
        # A store that does not answer is lost with the sender, which every member notices too.
        with contextlib.suppress(RuntimeError):
            store.set(ABORTED, reason)
        return True

    def close(self) -> None:
        """Ends the thread. Waiting calls of this process raise TransferAborted."""
        self._closed.set()
        self._set_here("the group is closed")
        self._armed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    def _set_here(self, reason: str) -> bool:
        # The first reason counts: it is the cause, later ones are its consequences.
        with self._lock:
            if self._reason is not None:
                return False
            self._reason = reason
            return True

    def _watch(self) -> None:
        while self._reason is None:
            self._armed.wait()
            if self._closed.is_set():
                return
            try:
                if self._store.check([ABORTED]):
                    self._set_here(self._store.get(ABORTED).decode())
            except RuntimeError:
                self._set_here("the sender is lost: its store does not answer")
            self._closed.wait(self._poll_s)


class Collectives(Protocol):
    """The methods of c10d's gloo and nccl process groups that a transfer needs."""

    def broadcast(self, tensors: list[Tensor], options: BroadcastOptions) -> Work: ...
    def gather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], options: GatherOptions
    ) -> Work: ...
    def abort(self) -> None: ...
    def name(self) -> str: ...


@dataclass(slots=True)
class Rendezvous:
    """The sender's store server, to which the other members connect; it listens until `close`."""

    address: str
    port: int
    world_size: int
    store: Store | None

    @classmethod
    def open(cls, address: str, port: int, world_size: int, timeout_s: float) -> "Rendezvous":
        """Listens on `port` of every interface (0: any free one) and returns at once. `address` is
        what the others connect to.

        Raises TransferFailed when the port is taken.
        """
        try:
            store = TCPStore(
                "127.0.0.1",
                port,
                None,
                is_master=True,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            raise TransferFailed(
                f"cannot listen on port {port} for the weight-transfer group: {first_line(error)}"
            ) from error
        return cls(address, store.port, world_size, store)

    def call_off(self, epoch: int, reason: str) -> None:
        """Aborts the forming of the group of `epoch`, for the sender too."""
        # The store may have been closed meanwhile.
        with contextlib.suppress(TransferTimeout, RuntimeError):
            PrefixStore(scope(epoch), connect_store("127.0.0.1", self.port, _LOCAL_S)).set(
                ABORTED, reason
            )

    def close(self) -> None:
        self.store = None


def scope(epoch: int) -> str:
    """Returns the prefix of the epoch's keys in the store."""
    return f"epoch-{epoch}"


def connect_store(address: str, port: int, timeout_s: float) -> Store:
    """Connects to the sender's store. Raises TransferTimeout when it does not listen in time."""
    try:
        return TCPStore(address, port, None, is_master=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise TransferTimeout(
            f"the sender does not answer on {address}:{port}: {first_line(error)}"
        ) from error


def make_process_group(
    backend: str, store: Store, *, rank: int, world_size: int, interface: str, timeout_s: float
) -> Collectives:
    """Makes a process group; gloo binds to the local address `interface`. Raises TransferFailed."""
    timeout = timedelta(seconds=timeout_s)
    c10d: Any = dist  # torch's type stubs leave out these classes' options and collectives
    try:
        if backend == "gloo":
            options = c10d.ProcessGroupGloo._Options()
            options._timeout = timeout
            options._devices = [c10d.ProcessGroupGloo.create_device(hostname=interface)]
            group = c10d.ProcessGroupGloo(store, rank, world_size, options)
        elif backend == "nccl":
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = timeout
            group = c10d.ProcessGroupNCCL(store, rank, world_size, options)
        else:
            raise TransferFailed(f"unknown backend {backend!r}; known are gloo, nccl")
    except RuntimeError as error:
        raise TransferFailed(
            f"the {backend} process group cannot be made: {first_line(error)}"
        ) from error
    return cast(Collectives, group)


def local_address(address: str, port: int) -> str:
    """Returns this host's address on the route to `address`, so that gloo does not guess an
    interface from the host's name.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def first_line(error: BaseException) -> str:
    """Returns what happened: c10d's messages carry a stack trace after the first line."""
    return str(error).partition("\n")[0].strip() or type(error).__name__
