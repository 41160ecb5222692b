"""Wakes everybody who waits for something to change."""

import asyncio


class Bell:
    """A broadcast without memory: `ring` wakes those who wait now."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float) -> bool:
        """False when nobody rang within `timeout_s`."""
        event = self._event  # before any suspension: a ring after this call is not missed
        if timeout_s <= 0:
            return False
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return False
        return True
