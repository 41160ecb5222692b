"""Keys that need work: each is held once, worked on by one worker at a time, tried again with
growing pauses after failures.
"""

import asyncio
import heapq
import random
from collections import OrderedDict

from pipelinerl_operator.kube.resources import ObjectKey

FIRST_RETRY_S = 0.05
MAX_RETRY_S = 60.0


class WorkQueue:
    """Bounded by the number of keys that exist. Times are those of the running loop."""

    def __init__(self) -> None:
        self._ready: OrderedDict[ObjectKey, float] = OrderedDict()
        """With the time since when each waits."""
        self._working: set[ObjectKey] = set()
        self._again: set[ObjectKey] = set()
        """Added while being worked on."""
        self._later: dict[ObjectKey, float] = {}
        """When each is due; the earliest wish counts."""
        self._heap: list[tuple[float, ObjectKey]] = []
        self._failures: dict[ObjectKey, int] = {}
        self._wake = asyncio.Event()

    @property
    def depth(self) -> int:
        return len(self._ready)

    @property
    def oldest_s(self) -> float:
        """How long the longest waiting key has waited."""
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
        """Adds it in `delay_s` seconds, unless it is due earlier anyway."""
        due = asyncio.get_running_loop().time() + delay_s
        if due >= self._later.get(key, float("inf")):
            return
        self._later[key] = due
        heapq.heappush(self._heap, (due, key))
        self._wake.set()

    def retry(self, key: ObjectKey, at_least_s: float = 0.0) -> float:
        """Adds it after a pause that doubles with each failure in a row; returns the pause in
        seconds.
        """
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        pause_s = max(
            at_least_s,
            min(MAX_RETRY_S, FIRST_RETRY_S * 2.0 ** min(failures, 20)) * random.uniform(0.75, 1.0),
        )
        self.add_after(key, pause_s)
        return pause_s

    def succeeded(self, key: ObjectKey) -> None:
        """Ends the row of failures."""
        self._failures.pop(key, None)

    def forget(self, key: ObjectKey) -> None:
        """The key's object is gone: nothing is to be remembered of it."""
        self._failures.pop(key, None)
        self._later.pop(key, None)

    async def get(self) -> ObjectKey:
        """The key that has waited longest; `done` must follow."""
        while True:
            due_in_s = self._promote()
            if self._ready:
                key, _ = self._ready.popitem(last=False)
                self._working.add(key)
                return key
            self._wake.clear()
            try:
                async with asyncio.timeout(due_in_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def done(self, key: ObjectKey) -> None:
        self._working.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def _promote(self) -> float | None:
        """Moves what is due to the ready ones; seconds until the next is due, None when nothing is."""
        now = asyncio.get_running_loop().time()
        while self._heap:
            due, key = self._heap[0]
            if self._later.get(key) != due:
                heapq.heappop(self._heap)  # withdrawn, or wanted earlier
            elif due <= now:
                heapq.heappop(self._heap)
                self.add(key)
            else:
                return due - now
        return None
