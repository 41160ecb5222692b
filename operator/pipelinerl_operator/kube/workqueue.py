"""Keys that need work: each is queued once, processed by one worker at a time, and retried with
growing delays after failures.
"""

import asyncio
import heapq
from collections import OrderedDict

from pipelinerl_common.backoff import Backoff
from pipelinerl_operator.kube.resources import ObjectKey

FIRST_RETRY_S = 0.05
MAX_RETRY_S = 60.0


class WorkQueue:
    """Queue of keys, bounded by the number of keys that exist. Times are the event loop's."""

    def __init__(self) -> None:
        self._ready: OrderedDict[ObjectKey, float] = OrderedDict()
        """Keys to process, with the time since which each waits."""
        self._working: set[ObjectKey] = set()
        self._again: set[ObjectKey] = set()
        """Keys that were added while they were processed."""
        self._later: dict[ObjectKey, float] = {}
        """When each delayed key is due; the earliest request counts."""
        self._heap: list[tuple[float, ObjectKey]] = []
        self._backoffs: dict[ObjectKey, Backoff] = {}
        self._wake = asyncio.Event()

    @property
    def depth(self) -> int:
        return len(self._ready)

    @property
    def oldest_s(self) -> float:
        """Waiting time of the key that waits longest."""
        return (
            asyncio.get_running_loop().time() - next(iter(self._ready.values()))
            if self._ready
            else 0.0
        )

    def add(self, key: ObjectKey) -> None:
        self._later.pop(key, None)
        if key in self._working:
            self._again.add(key)
        elif key not in self._ready:
            self._ready[key] = asyncio.get_running_loop().time()
            self._wake.set()

    def add_after(self, key: ObjectKey, delay_s: float) -> None:
        """Adds the key after `delay_s` seconds, unless it is due earlier."""
        due = asyncio.get_running_loop().time() + delay_s
        if due >= self._later.get(key, float("inf")):
            return
        self._later[key] = due
        heapq.heappush(self._heap, (due, key))
        self._wake.set()

    def retry(self, key: ObjectKey, at_least_s: float = 0.0) -> float:
        """Adds the key after a delay that doubles with each failure, and returns the delay."""
        backoff = self._backoffs.setdefault(key, Backoff(FIRST_RETRY_S, MAX_RETRY_S, jitter=0.25))
        pause_s = max(at_least_s, backoff.next_delay())
        self.add_after(key, pause_s)
        return pause_s

    def succeeded(self, key: ObjectKey) -> None:
        """Resets the delay after failures."""
        self._backoffs.pop(key, None)

    def forget(self, key: ObjectKey) -> None:
        """Drops what is known about a key whose object no longer exists."""
        self._backoffs.pop(key, None)
        self._later.pop(key, None)

    async def get(self) -> ObjectKey:
        """Waits for a key and returns the one that has waited longest; `done` must follow."""
        while True:
            due_in_s = self._promote()
            if self._ready:
                key, _ = self._ready.popitem(last=False)
                self._working.add(key)
                return key
            # No await since `_promote`, so this cannot clear the wake-up of a key just added.
            self._wake.clear()
            try:
                async with asyncio.timeout(due_in_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def done(self, key: ObjectKey) -> None:
        """Ends the processing of a key; one that was added meanwhile is queued again."""
        self._working.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def _promote(self) -> float | None:
        """Queues the keys that are due; returns the seconds until the next one is due, or None."""
        now = asyncio.get_running_loop().time()
        while self._heap:
            due, key = self._heap[0]
            if self._later.get(key) != due:
                heapq.heappop(self._heap)  # withdrawn, or due earlier
            elif due <= now:
                heapq.heappop(self._heap)
                self.add(key)
            else:
                return due - now
        return None
