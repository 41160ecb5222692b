"""The flag that calls a group off, seen by every member within a fraction of a second."""

import contextlib
import threading

from torch._C._distributed_c10d import Store

from pipelinerl_weights.errors import TransferAborted

ABORTED = "aborted"
"""The key; its value is the reason."""
_POLL_S = 0.05
_MEMBERS_PER_POLL = 64
"""With more members than this each looks less often, so that the sender's store is not flooded."""


class AbortFlag:
    """A key of the group's store, mirrored in this process by a thread that looks at it while a
    transfer is under way.

    The thread has its own connection: a sender that was stopped (not killed) blocks it, but nobody
    else.
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
        """Why the group is called off, or None."""
        return self._reason

    def raise_if_set(self) -> None:
        if self._reason is not None:
            raise TransferAborted(self._reason)

    def arm(self) -> None:
        """A transfer begins: look at the store from now on."""
        self._armed.set()

    def disarm(self) -> None:
        """The transfer is over."""
        if not self._closed.is_set():
            self._armed.clear()

    def set(self, reason: str, store: Store) -> bool:
        """Tells everyone, over `store` (the caller's connection). False if it was called off
        before.
        """
        if not self._set_here(reason):
            return False
        with contextlib.suppress(
            RuntimeError
        ):  # the store is gone with the sender, and everyone sees that too
            store.set(ABORTED, reason)
        return True

    def close(self) -> None:
        """Ends the thread. What waits in this process raises TransferAborted."""
        self._closed.set()
        self._set_here("the group is closed")
        self._armed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    def _set_here(self, reason: str) -> bool:
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
                self._set_here("the sender is gone: its store does not answer")
            self._closed.wait(self._poll_s)
