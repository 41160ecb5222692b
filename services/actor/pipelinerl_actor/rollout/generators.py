"""The actor's generators as one: requests go to the least loaded one that serves, and at most
`max_running` sequences run on each.

A trajectory's deadline is here too, since it stops while the trajectory waits for a generator.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

from pipelinerl.v1.admission_pb2 import GeneratorLoad
from pipelinerl_actor.rollout.failures import Retries, RolloutStopped
from pipelinerl_actor.rollout.generator_client import Completions, RolloutClient, TurnRequest
from pipelinerl_actor.rollout.lease_client import LeaseReports
from pipelinerl_actor.rollout.metrics import RolloutMeter
from pipelinerl_common.backoff import Backoff
from pipelinerl_common.errors import TemporaryError
from pipelinerl_common.generator_client import ConnectionLost, GeneratorAway, GeneratorError
from pipelinerl_common.tracing import span

log = logging.getLogger(__name__)

_FIRST_REST_S, _MAX_REST_S = 0.2, 2.0
_PROBE_PERIOD_S = 0.5
_MAX_WAIT_S = 1.0
"""Longest sleep of a request that waits for a generator; any change wakes it earlier."""
_LOAD_PERIOD_S = 1.0
_LOAD_S = 2.0
"""Longest time for a generator to report its load."""


class TrajectoryClock:
    """A deadline of `limit_s` seconds for the block `running()`, which raises TimeoutError then.
    Blocks inside it that are `paused()` do not count.
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
    def paused(self) -> Iterator[None]:
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


@dataclass(slots=True, eq=False)
class _Generator:
    """One generator, and what this actor knows of its state."""

    client: RolloutClient
    running: int = 0
    """Sequences that it decodes for this actor."""
    running_seconds: float = 0.0
    """`running`, integrated over time up to `changed_at`."""
    changed_at: float = 0.0
    num_answered: int = 0
    backoff: Backoff = field(default_factory=lambda: Backoff(_FIRST_REST_S, _MAX_REST_S))
    """Counts its failures in a row."""
    serves: bool = False
    """Whether it was found to serve, and has not been unreachable since."""
    rest_until: float = 0.0
    """No request is sent before. After a failure it gets one at a time until one succeeds."""

    def add(self, n: int) -> None:
        now = asyncio.get_running_loop().time()
        if self.changed_at:
            self.running_seconds += self.running * (now - self.changed_at)
        self.changed_at = now
        self.running += n


class Generators:
    """All generators of an actor. Requests that find no free slot wait, first come first served."""

    def __init__(
        self,
        clients: Sequence[RolloutClient],
        *,
        max_running: int,
        max_retries: int,
        meter: RolloutMeter,
    ) -> None:
        self._generators = [_Generator(client) for client in clients]
        self.max_running = max_running
        self._max_retries = max_retries
        self.meter = meter
        self.limit: int | None = None
        """Sequences that the staleness policy allows at once on all generators together; None
        without a limit.
        """
        self._turnstile = asyncio.Lock()
        self._changed = asyncio.Event()

    @property
    def num_slots(self) -> int:
        """Sequences that run at once when all generators are busy."""
        return self.max_running * len(self._generators)

    @property
    def num_serving_slots(self) -> int:
        """Slots of the generators that serve. Groups leased beyond them would only wait, and delay
        every step that waits for those groups.
        """
        return self.max_running * sum(generator.serves for generator in self._generators)

    @property
    def most_at_once(self) -> int:
        """Largest n of a request."""
        return self.max_running if self.limit is None else max(1, min(self.max_running, self.limit))

    @property
    def num_running(self) -> int:
        return sum(generator.running for generator in self._generators)

    async def probe(self) -> None:
        """Asks every generator that is not known to serve whether it does."""
        waiting = [generator for generator in self._generators if not generator.serves]
        await asyncio.gather(*map(self._probe, waiting))

    async def _probe(self, generator: _Generator) -> None:
        generator.serves = await generator.client.serves()

    async def watch(self) -> None:
        """Consumes the generators' readiness, produces slots; waits for answers and its period;
        runs until cancelled. Each generator has its own loop, so that a slow one delays no other.
        """

        async def watch_one(generator: _Generator) -> None:
            while True:
                await asyncio.sleep(_PROBE_PERIOD_S)
                if not generator.serves:
                    await self._probe(generator)

        await asyncio.gather(*map(watch_one, self._generators))

    async def report_loads(self, reports: LeaseReports) -> None:
        """Consumes the generators' loads, produces reports for the preprocessor, whose policy may
        adapt to them; waits for answers and its period; runs until cancelled.
        """
        while True:
            answers = await asyncio.gather(*map(self._load_of, self._generators))
            if loads := [load for load in answers if load is not None]:
                reports.add_loads(loads)
            await asyncio.sleep(_LOAD_PERIOD_S)

    async def _load_of(self, generator: _Generator) -> GeneratorLoad | None:
        """None for a generator that does not answer in time: nothing is reported of it."""
        try:
            load = await generator.client.load(_LOAD_S)
        except GeneratorError as error:
            log.debug("generator=%s reports no load: %s", generator.client.url, error)
            return None
        generator.add(0)  # integrates up to now
        load.requested_seconds_total = generator.running_seconds
        load.answered_total = generator.num_answered
        return load

    async def complete(self, request: TurnRequest, clock: TrajectoryClock) -> Completions:
        """Waits for a generator with room while `clock` is paused, then samples. Retries after
        temporary errors.

        Raises RolloutStopped when the request is stopped before it is sent; GivenUp:
        "generator_error" after `max_retries`, or what no retry fixes; SettingsError for a refused
        token.
        """
        retries = Retries("generator_error", self._max_retries)
        while True:
            try:
                completions = await self._complete_on_one(request, clock)
            except GeneratorAway:
                # No failure of the request: it waits for another generator, as long as that takes.
                self.meter.failed("generator_away")
            except TemporaryError as error:
                self.meter.failed("generator_error")
                await retries.wait(error)
            else:
                self.meter.sampled(completions.turns)
                return completions

    async def _complete_on_one(self, request: TurnRequest, clock: TrajectoryClock) -> Completions:
        async with self._slot(request.n, clock, request.stop) as generator:
            with span("generate", sequences=request.n) as generating:
                try:
                    completions = await generator.client.complete(request)
                except GeneratorAway as error:
                    generator.serves = False
                    self._let_rest(generator, error.retry_after_s, error)
                    raise
                except ConnectionLost as error:
                    self._let_rest(generator, _FIRST_REST_S, error)
                    raise
                if generator.backoff.num_failures:
                    log.info("generator=%s answers again", generator.client.url)
                generator.backoff.reset()
                generator.serves = True
                generating.set(tokens=sum(len(turn.token_ids) for turn in completions.turns))
        return completions

    @asynccontextmanager
    async def _slot(
        self, n: int, clock: TrajectoryClock, stop: asyncio.Event | None
    ) -> AsyncIterator[_Generator]:
        with clock.paused():
            # The request at the head of the line holds the lock while it looks for room: otherwise
            # small requests would overtake a large one indefinitely.
            async with self._turnstile:
                generator = await self._wait_for_room(n, stop)
        generator.add(n)
        try:
            yield generator
            generator.num_answered += n
        finally:
            generator.add(-n)
            self._changed.set()

    async def _wait_for_room(self, n: int, stop: asyncio.Event | None) -> _Generator:
        while not (stop is not None and stop.is_set()):
            if (generator := self._pick(n)) is not None:
                return generator
            self._changed.clear()
            # The timeout is for rests that end and limits that rise, which set no event.
            await wait_for_event(self._changed, _MAX_WAIT_S)
        raise RolloutStopped

    def _pick(self, n: int) -> _Generator | None:
        if self.limit is not None and self.num_running and self.num_running + n > self.limit:
            return None
        now = asyncio.get_running_loop().time()
        able = [
            generator
            for generator in self._generators
            if generator.running + n <= self.max_running
            and now >= generator.rest_until
            and (generator.backoff.num_failures == 0 or generator.running == 0)
        ]
        return min(able, key=lambda generator: generator.running, default=None)

    def _let_rest(self, generator: _Generator, at_least_s: float, error: Exception) -> None:
        now = asyncio.get_running_loop().time()
        if now < generator.rest_until:
            return  # another of its requests failed just before, for the same reason
        rest_s = max(at_least_s * random.uniform(0.5, 1.0), generator.backoff.next_delay())
        generator.rest_until = now + rest_s
        level = logging.WARNING if generator.backoff.num_failures in (1, 10) else logging.DEBUG
        log.log(level, "generator=%s rests for %.1f s: %s", generator.client.url, rest_s, error)


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> None:
    """Returns when `event` is set or `timeout_s` has passed."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
