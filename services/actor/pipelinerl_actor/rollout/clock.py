"""A trajectory's deadline, which does not run while the trajectory waits for a generator."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


class TrajectoryClock:
    """Raises TimeoutError in the block `running()` when `limit_s` seconds have passed that were not
    `standing()`.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._timeout: asyncio.Timeout | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.timeout(self.limit_s) as self._timeout:
            yield

    @property
    def expired(self) -> bool:
        return self._timeout is not None and self._timeout.expired()

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Does nothing when the deadline has passed, or outside of `running()`."""
        timeout = self._timeout
        deadline = timeout.when() if timeout is not None else None
        if timeout is None or deadline is None or timeout.expired():
            yield
            return
        loop = asyncio.get_running_loop()
        left_s = deadline - loop.time()
        timeout.reschedule(None)
        try:
            yield
        finally:
            if not timeout.expired():
                timeout.reschedule(loop.time() + left_s)
