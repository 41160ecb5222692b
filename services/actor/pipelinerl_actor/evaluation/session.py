"""What an evaluation needs around it: connections, verifier, chat template; put together for one task."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

from pipelinerl_actor.evaluation.evaluate import Evaluator
from pipelinerl_actor.rollout.continuation import Continuation
from pipelinerl_actor.rollout.generator_client import GeneratorClient
from pipelinerl_actor.rollout.generators import Generators
from pipelinerl_actor.rollout.group import GroupRoller
from pipelinerl_actor.rollout.meter import Meter
from pipelinerl_actor.rollout.trajectory import Sampler
from pipelinerl_actor.rollout.verifier import Verifier
from pipelinerl_actor.task import TaskName
from pipelinerl_actor.task_loader import load_task
from pipelinerl_common.errors import Unavailable
from pipelinerl_common.metrics import ACTOR, Metrics
from pipelinerl_common.settings import TaskSettings

_CONNECT_S = 10.0
_ASK_S = 5.0
_PAUSE_S = 0.2


@asynccontextmanager
async def evaluator(
    task: TaskSettings,
    seed: int,
    generators: Sequence[str],
    model: Path,
    *,
    max_running: int,
    token: str | None = None,
    on_prompt: Callable[[], None] = lambda: None,
) -> AsyncIterator[Evaluator]:
    """An Evaluator of `task` on the generators at these base URLs; `task.group_size` answers a prompt.

    Raises SettingsError for a task that cannot be made.
    """
    name = TaskName(task.path, task.args, seed)
    made = load_task(name)
    meter = Meter(Metrics(ACTOR, "evaluation"))
    async with AsyncExitStack() as stack:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        )
        clients = [GeneratorClient(url, session, token) for url in generators]
        pool = Generators(clients, max_running=max_running, max_retries=task.max_retries, meter=meter)
        verifier = Verifier(made, name, timeout_s=task.verifier_timeout_seconds, max_retries=task.max_retries)
        stack.push_async_callback(verifier.close)
        sampler = Sampler(pool, task.sampling, verifier, Continuation(model), seed)
        roller = GroupRoller("evaluation", made, task, sampler, meter)
        at_once = max(1, -(-pool.num_slots // task.group_size) + 1)
        yield Evaluator(roller, num_samples=task.group_size, at_once=at_once, on_prompt=on_prompt)


async def until_ready(url: str, timeout_s: float, is_alive: Callable[[], bool]) -> None:
    """Returns when the generator at `url` serves. Raises Unavailable when `is_alive` turns false, or after `timeout_s`."""
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
