"""A trajectory's deadline, which does not run while the trajectory waits for a generator.

Several generators as one: requests go to the least loaded that is well; H caps what runs on
each.

How the actor's generators do: asked every second, told to the preprocessor, whose policy may
adapt to it.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from pipelinerl.v1.admission_pb2 import GeneratorLoad
from pipelinerl_actor.rollout.failures import TrajectoryStopped, backoff_s, exhausted
from pipelinerl_actor.rollout.generator_client import Completions, RolloutClient, TurnRequest
from pipelinerl_actor.rollout.lease_client import LeaseReports
from pipelinerl_actor.rollout.metrics import RolloutMeter
from pipelinerl_common.errors import TemporaryError
from pipelinerl_common.generator_client import ConnectionLost, GeneratorAway, GeneratorError
from pipelinerl_common.tracing import span


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


log = logging.getLogger(__name__)

_MAX_AWAY_BACKOFF_S = 2.0
_LOST_BACKOFF_S = 0.2
_LOOK_PERIOD_S = 0.5
_LOOK_AGAIN_S = 1.0
"""Longest sleep of a request that waits for a generator; it is woken earlier by whatever changes.
"""


@dataclass(slots=True, eq=False)
class _Generator:
    client: RolloutClient
    running: int = 0
    """Sequences being decoded for us."""
    running_seconds: float = 0.0
    """`running`, integrated over time up to `changed_at`."""
    changed_at: float = 0.0
    num_answered: int = 0
    failures_in_a_row: int = 0
    serves: bool = False
    """Has been found to, and was not away since."""
    rest_until: float = 0.0
    """Until then it is left alone; after a failure it gets one request at a time until one
    succeeds.
    """

    def add(self, n: int) -> None:
        now = asyncio.get_running_loop().time()
        if self.changed_at:
            self.running_seconds += self.running * (now - self.changed_at)
        self.changed_at = now
        self.running += n


class Generators:
    """The actor's generators. At most `max_running` sequences run on each; more requests wait,
    first come first served.
    """

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
        """Sequences that may run at once on all generators together, by the staleness policy; None
        without a limit.
        """
        self._turnstile = asyncio.Lock()
        self._changed = asyncio.Event()

    def tally(self, url: str) -> tuple[float, int]:
        """Of one generator: sequences asked for and unanswered, integrated over time, and sequences
        answered.
        """
        generator = next(each for each in self._generators if each.client.url == url)
        generator.add(0)
        return generator.running_seconds, generator.num_answered

    @property
    def num_slots(self) -> int:
        """Sequences that run at once when all generators are busy."""
        return self.max_running * len(self._generators)

    @property
    def num_serving_slots(self) -> int:
        """Of those that serve: more would be leased only to wait, and hold up whoever waits for
        those groups.
        """
        return self.max_running * sum(generator.serves for generator in self._generators)

    async def look(self) -> None:
        """Asks those that are not known to serve. What one answers counts at once, however long
        another takes.
        """
        await asyncio.gather(
            *(self._look_at(generator) for generator in self._generators if not generator.serves)
        )

    async def _look_at(self, generator: _Generator) -> None:
        generator.serves = await generator.client.serves()

    async def watch(self) -> None:
        """Looks for ever, at each by itself. Consumes the answers, produces slots, waits for
        answers and its period.
        """
        await asyncio.gather(*map(self._watch_one, self._generators))

    async def _watch_one(self, generator: _Generator) -> None:
        while True:
            await asyncio.sleep(_LOOK_PERIOD_S)
            if not generator.serves:
                await self._look_at(generator)

    @property
    def most_at_once(self) -> int:
        """Largest n of a request."""
        return self.max_running if self.limit is None else max(1, min(self.max_running, self.limit))

    @property
    def num_running(self) -> int:
        return sum(generator.running for generator in self._generators)

    async def complete(self, request: TurnRequest, clock: TrajectoryClock) -> Completions:
        """Waits for a generator with room, while `clock` stands, then samples. Temporary errors are
        tried again.

        Raises Stopped when the request is stopped before it is sent; GivenUp: "generator_error"
        after `max_retries`, or what no retry can help; SettingsError for a refused token.
        """
        num_failures = 0
        while True:
            try:
                async with self._slot(request.n, clock, request.stop) as generator:
                    with span("generate", sequences=request.n) as generating:
                        completions = await self._complete_on(generator, request)
                        generating.set(
                            tokens=sum(len(turn.token_ids) for turn in completions.turns)
                        )
            except GeneratorAway:
                self.meter.failed("generator_away")
                continue
            except TemporaryError as error:
                self.meter.failed("generator_error")
                num_failures += 1
                if given_up := exhausted("generator_error", num_failures, self._max_retries, error):
                    raise given_up from error
                await asyncio.sleep(backoff_s(num_failures))
                continue
            self.meter.sampled(completions.turns)
            return completions

    async def _complete_on(self, generator: _Generator, request: TurnRequest) -> Completions:
        try:
            completions = await generator.client.complete(request)
        except GeneratorAway as error:
            generator.serves = False
            self._let_rest(generator, error.retry_after_s, error)
            raise
        except ConnectionLost as error:
            self._let_rest(generator, _LOST_BACKOFF_S, error)
            raise
        if generator.failures_in_a_row:
            log.info("generator=%s works again", generator.client.url)
        generator.failures_in_a_row = 0
        generator.serves = True
        return completions

    @asynccontextmanager
    async def _slot(
        self, n: int, clock: TrajectoryClock, stop: asyncio.Event | None
    ) -> AsyncIterator[_Generator]:
        with clock.standing():
            async with self._turnstile:
                while True:
                    if stop is not None and stop.is_set():
                        raise TrajectoryStopped
                    if (generator := self._pick(n)) is not None:
                        break
                    self._changed.clear()
                    try:
                        async with asyncio.timeout(_LOOK_AGAIN_S):
                            await self._changed.wait()
                    except TimeoutError:
                        pass
        generator.add(n)
        try:
            yield generator
            generator.num_answered += n
        finally:
            generator.add(-n)
            self._changed.set()

    def _pick(self, n: int) -> _Generator | None:
        if self.limit is not None and self.num_running and self.num_running + n > self.limit:
            return None
        now = asyncio.get_running_loop().time()
        able = [
            generator
            for generator in self._generators
            if generator.running + n <= self.max_running
            and now >= generator.rest_until
            and (generator.failures_in_a_row == 0 or generator.running == 0)
        ]
        return min(able, key=lambda generator: generator.running, default=None)

    def _let_rest(self, generator: _Generator, at_least_s: float, error: Exception) -> None:
        now = asyncio.get_running_loop().time()
        if now < generator.rest_until:
            return  # another of its requests has already told
        generator.failures_in_a_row += 1
        rest_s = max(
            at_least_s, min(0.1 * 2 ** min(generator.failures_in_a_row, 10), _MAX_AWAY_BACKOFF_S)
        )
        generator.rest_until = now + rest_s * random.uniform(0.5, 1.0)
        level = logging.WARNING if generator.failures_in_a_row in (1, 10) else logging.DEBUG
        log.log(level, "generator=%s rests for %.1f s: %s", generator.client.url, rest_s, error)


_PERIOD_S = 1.0
_ANSWER_S = 2.0


class LoadWatch:
    """A generator that does not answer in time is left out, so nothing is said of it."""

    def __init__(
        self, clients: Sequence[RolloutClient], generators: Generators, reports: LeaseReports
    ) -> None:
        self._clients = clients
        self._generators = generators
        self._reports = reports

    async def run(self) -> None:
        """Consumes the generators' answers, produces reports; waits for answers and its period,
        never ends.
        """
        while True:
            answers = await asyncio.gather(*map(self._ask, self._clients))
            if loads := [load for load in answers if load is not None]:
                self._reports.add_loads(loads)
            await asyncio.sleep(_PERIOD_S)

    async def _ask(self, client: RolloutClient) -> GeneratorLoad | None:
        try:
            load = await client.load(_ANSWER_S)
        except GeneratorError as error:
            log.debug("generator=%s reports no load: %s", client.url, error)
            return None
        load.requested_seconds_total, load.answered_total = self._generators.tally(client.url)
        return load
