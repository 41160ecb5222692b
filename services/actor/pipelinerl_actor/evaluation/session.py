"""An evaluation of one task on a pool of generators, and the wait until a generator serves."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp

from pipelinerl_actor.evaluation.evaluate import Evaluator
from pipelinerl_actor.rollout.assembly import Pool, open_rollouts
from pipelinerl_actor.rollout.meter import Meter
from pipelinerl_actor.task import Task
from pipelinerl_common.errors import Unavailable
from pipelinerl_common.metrics import ACTOR, Metrics
from pipelinerl_common.settings import TaskSettings

_NAME = "evaluation"
_ASK_S = 5.0
_PAUSE_S = 0.2


@asynccontextmanager
async def evaluator(
    task: Task,
    settings: TaskSettings,
    seed: int,
    pool: Pool,
    on_prompt: Callable[[], None] = lambda: None,
) -> AsyncIterator[Evaluator]:
    """An Evaluator of `task`, which `settings` and `seed` make, on `pool`; `settings.group_size`
    answers a prompt.
    """
    meter = Meter(Metrics(ACTOR, _NAME))
    async with open_rollouts(_NAME, task, settings, seed, pool, meter) as rollouts:
        at_once = max(1, -(-rollouts.generators.num_slots // settings.group_size) + 1)
        yield Evaluator(
            rollouts.roller, num_samples=settings.group_size, at_once=at_once, on_prompt=on_prompt
        )


async def until_ready(url: str, timeout_s: float | None, is_alive: Callable[[], bool]) -> None:
    """Returns when the generator at `url` serves. `timeout_s` is None within a deadline of the
    caller's.

    Raises Unavailable when `is_alive` turns false, or after `timeout_s`.
    """
    try:
        async with asyncio.timeout(timeout_s), aiohttp.ClientSession() as session:
            while not await _is_ready(session, f"{url}/ready"):
                if not is_alive():
                    raise Unavailable("the generator's process ended before it served anything")
                await asyncio.sleep(_PAUSE_S)
    except TimeoutError:
        raise Unavailable(f"the generator serves nothing after {timeout_s:g} s") from None


async def _is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=_ASK_S)) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
