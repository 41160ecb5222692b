"""Delays between attempts at something that may soon succeed.

Not tenacity or stamina, which retry a function as a whole: the loops here decide by the error
whether to try again, some count over many calls, and some wait for an event or in a thread.
"""

import asyncio
import random
from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """Exponential backoff with jitter and a cap.

    Example: Backoff(0.2, 5.0) yields delays of at most 0.2, 0.4, 0.8, ... 5.0, 5.0 seconds.
    Asynchronous callers await `sleep()`; the others wait for `next_delay()` in their own way, for
    example with `time.sleep` or as the timeout of an event.
    """

    first_s: float = 0.2
    max_s: float = 5.0
    jitter: float = 0.5
    """Largest share by which a delay is shortened at random; 0 makes delays exact."""
    num_failures: int = 0
    """Failed attempts since the start or the last `reset`."""

    def next_delay(self) -> float:
        """Counts a failed attempt and returns the seconds to wait before the next one."""
        # The exponent is bounded so that the power stays finite after many failures.
        longest_s = min(self.max_s, self.first_s * 2.0 ** min(self.num_failures, 64))
        self.num_failures += 1
        # Jitter spreads clients that failed together, so that they do not return together.
        return longest_s * random.uniform(1 - self.jitter, 1)

    async def sleep(self) -> None:
        """Counts a failed attempt and waits."""
        await asyncio.sleep(self.next_delay())

    def reset(self) -> None:
        """Starts over from `first_s`, after a success."""
        self.num_failures = 0
