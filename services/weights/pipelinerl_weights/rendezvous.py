"""Where a group's members meet, and the flag that aborts it for every member within a fraction of a
second.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipelinerl_weights.errors import TransferAborted, TransferTimeout
from pipelinerl_weights.store import GroupStore, StoreServer, listen

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

    def __init__(self, store: GroupStore, world_size: int) -> None:
        self.on_set: Callable[[], None] = lambda: None
        """Called once, in the thread that learns of the abort first: this rank's communicator has
        to be aborted by this rank.
        """
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

    def set(self, reason: str, store: GroupStore) -> bool:
        """Aborts the group for every member, over `store`, the caller's connection. Returns False
        if it was aborted before.
        """
        if not self._is_first(reason):
            return False
        # The others first: a library may take its time to abort. A store that does not answer is
        # lost with the sender, which every member notices too.
        with contextlib.suppress(RuntimeError):
            store.set(ABORTED, reason)
        self.on_set()
        return True

    def close(self) -> None:
        """Ends the thread and its connection. Waiting calls of this process raise
        TransferAborted.
        """
        self._closed.set()
        self._set_here("the group is closed")
        self._armed.set()
        self._store.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    def _set_here(self, reason: str) -> None:
        if self._is_first(reason):
            self.on_set()

    def _is_first(self, reason: str) -> bool:
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


@dataclass(slots=True)
class Rendezvous:
    """The sender's store server, to which the other members connect; it listens until `close`."""

    address: str
    port: int
    world_size: int
    server: StoreServer

    @classmethod
    def open(cls, address: str, port: int, world_size: int) -> "Rendezvous":
        """Listens on `port` (0: any free one) of `address`, which the others connect to, and
        returns at once. Raises TransferFailed when the port is taken.
        """
        server = listen(address, port)
        return cls(address, server.port, world_size, server)

    def call_off(self, epoch: int, reason: str) -> None:
        """Aborts the forming of the group of `epoch`, for the sender too."""
        # The store may have been closed meanwhile.
        with contextlib.suppress(TransferTimeout, RuntimeError):
            store = GroupStore.connect(self.server.host, self.port, _LOCAL_S, scope(epoch))
            try:
                store.set(ABORTED, reason)
            finally:
                store.close()

    def close(self) -> None:
        self.server.close()


def scope(epoch: int) -> str:
    """Returns the prefix of the epoch's keys in the store."""
    return f"epoch-{epoch}"


def host_identity() -> str:
    """Returns a name of this host that its processes share: ranks of one host reach each other
    without the network. Two pods of a node are two hosts, since each has a network of its own.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # not Linux
        return socket.gethostname()


def local_address(address: str, port: int) -> str:
    """Returns this host's address on the route to `address`, so that gloo does not guess an
    interface from the host's name.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
