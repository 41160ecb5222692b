"""What rolling a task out needs, put together once for training and for evaluation: generators,
verifier, chat template.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from pipelinerl_actor.rollout.continuation import Continuation
from pipelinerl_actor.rollout.generator_client import GeneratorClient
from pipelinerl_actor.rollout.generators import Generators
from pipelinerl_actor.rollout.group import GroupRoller
from pipelinerl_actor.rollout.meter import Meter
from pipelinerl_actor.rollout.trajectory import Sampler
from pipelinerl_actor.rollout.verifier import Verifier
from pipelinerl_actor.task import Task, TaskName
from pipelinerl_common.settings import TaskSettings

_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class Pool:
    """Which generators there are, and the model that they serve."""

    urls: Sequence[str]
    """Base URLs, for example "http://127.0.0.1:8000"."""
    model: Path
    """Folder with the model's tokenizer and chat template."""
    max_running: int
    """Most sequences at once on each."""
    token: str | None = None


@dataclass(frozen=True, slots=True)
class Rollouts:
    clients: Sequence[GeneratorClient]
    generators: Generators
    roller: GroupRoller


@asynccontextmanager
async def open_rollouts(
    job: str, task: Task, settings: TaskSettings, seed: int, pool: Pool, meter: Meter
) -> AsyncIterator[Rollouts]:
    """Connections and the verifier's processes end with the block. `task` is what `settings` and
    `seed` make.
    """
    async with AsyncExitStack() as stack:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        )
        clients = [GeneratorClient(url, session, pool.token) for url in pool.urls]
        generators = Generators(
            clients, max_running=pool.max_running, max_retries=settings.max_retries, meter=meter
        )
        name = TaskName(settings.path, settings.args, seed)
        verifier = Verifier(
            task,
            name,
            timeout_s=settings.verifier_timeout_seconds,
            max_retries=settings.max_retries,
        )
        stack.push_async_callback(verifier.close)
        sampler = Sampler(generators, settings.sampling, verifier, Continuation(pool.model), seed)
        yield Rollouts(clients, generators, GroupRoller(job, task, settings, sampler, meter))
