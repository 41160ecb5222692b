"""Tokens per second at a given number of concurrent requests."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

Complete = Callable[[], Awaitable[int]]
"""Does one request; returns its number of tokens."""


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """One request. Its tokens are taken as evenly spread over its time."""

    start: float
    end: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Level:
    """What was measured. Example: Level(concurrency=8, tokens_per_second=950.0, num_requests=31)."""

    concurrency: int
    tokens_per_second: float
    num_requests: int
    """Requests that were under way in the time measured."""


def levels(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself. Example: levels(12) is [1, 2, 4, 8, 12]."""
    doubled = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return [*doubled, most]


def tokens_within(spans: Iterable[RequestSpan], start: float, end: float) -> float:
    """Tokens that fall between two times. Example: of a request of 10 tokens from 0 to 5, 4 fall
    between 3 and 7.
    """
    total = 0.0
    for span in spans:
        common = min(span.end, end) - max(span.start, start)
        if common > 0:
            total += span.num_tokens * common / (span.end - span.start)
    return total


async def measure(complete: Complete, concurrency: int, seconds: float) -> Level:
    """Keeps `concurrency` requests under way; measures for `seconds` from when each place has
    finished its first one.

    Ends when the requests then under way have. Whatever `complete` raises is raised here, and the
    rest is cancelled.
    """
    crew = _Crew(complete, concurrency)
    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(concurrency):
                tasks.create_task(crew.work())
            await crew.is_warm.wait()
            start = time.monotonic()
            await asyncio.sleep(seconds)
            end = time.monotonic()
            crew.is_over = True
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    within = [span for span in crew.spans if span.end > start and span.start < end]
    return Level(concurrency, tokens_within(within, start, end) / (end - start), len(within))


@dataclass
class _Crew:
    """The places of one level: each does one request after another."""

    complete: Complete
    concurrency: int
    spans: list[RequestSpan] = field(default_factory=list)
    num_warm: int = 0
    is_warm: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: bool = False

    async def work(self) -> None:
        await self._request()
        self.num_warm += 1
        if self.num_warm == self.concurrency:
            self.is_warm.set()
        while not self.is_over:
            await self._request()

    async def _request(self) -> None:
        start = time.monotonic()
        num_tokens = await self.complete()
        self.spans.append(RequestSpan(start, time.monotonic(), num_tokens))
