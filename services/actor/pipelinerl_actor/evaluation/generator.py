"""The evaluator's own generator, the wait until a generator serves, and an evaluation on a pool of
generators.
"""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pipelinerl_actor.evaluation.evaluate import Evaluator
from pipelinerl_actor.rollout.metrics import RolloutMeter
from pipelinerl_actor.rollout.start import GeneratorPool, open_roller
from pipelinerl_actor.task import Task
from pipelinerl_common.child_process import stop
from pipelinerl_common.errors import Unavailable
from pipelinerl_common.generator_client import GeneratorClient
from pipelinerl_common.metrics import ACTOR, Metrics
from pipelinerl_common.service import Wiring
from pipelinerl_common.settings import TaskSettings

log = logging.getLogger(__name__)

_NAME = "evaluation"
_ASK_S = 5.0
_PAUSE_S = 0.2
_STOP_S = 30.0
"""An engine needs time to end, and one that is killed may leave workers behind."""


@asynccontextmanager
async def evaluator(
    task: Task,
    settings: TaskSettings,
    seed: int,
    pool: GeneratorPool,
    on_prompt: Callable[[], None] = lambda: None,
) -> AsyncIterator[Evaluator]:
    """An Evaluator of `task`, which `settings` and `seed` make, on `pool`. It samples
    `settings.group_size` answers for each prompt.
    """
    meter = RolloutMeter(Metrics(ACTOR, _NAME))
    async with open_roller(_NAME, task, settings, seed, pool, meter) as (roller, generators):
        at_once = max(1, -(-generators.num_slots // settings.group_size) + 1)
        yield Evaluator(
            roller, num_samples=settings.group_size, at_once=at_once, on_prompt=on_prompt
        )


async def until_ready(url: str, timeout_s: float | None, is_alive: Callable[[], bool]) -> None:
    """Returns when the generator at `url` serves. `timeout_s` is None for a caller that has a
    deadline of its own around the call.

    Raises Unavailable when `is_alive` turns false, or after `timeout_s`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await _until_ready(GeneratorClient(url), is_alive)
    except TimeoutError:
        raise Unavailable(f"the generator serves nothing after {timeout_s:g} s") from None


async def _until_ready(client: GeneratorClient, is_alive: Callable[[], bool]) -> None:
    while not await client.is_ready(_ASK_S):
        if not is_alive():
            raise Unavailable("the generator's process ended before it served anything")
        await asyncio.sleep(_PAUSE_S)


@dataclass(frozen=True, slots=True)
class OwnGenerator:
    """A generator's process, started for one evaluation."""

    url: str
    process: asyncio.subprocess.Process

    async def until_ready(self) -> None:
        """Returns when it serves; the deadline is the caller's. Raises Unavailable when it ends
        before.
        """
        await until_ready(self.url, None, lambda: self.process.returncode is None)

    async def ended(self) -> None:
        """Waits for the end of the process, which is always too early. Raises Unavailable then."""
        raise Unavailable(
            f"the generator ended with status {await self.process.wait()} while it was needed"
        )


@asynccontextmanager
async def generator(wiring: Wiring, model: Path, step: int) -> AsyncIterator[OwnGenerator]:
    """A generator that serves `model` as version `step` on the evaluator's own address, until the
    end of the block. Its log lines go to the evaluator's log.
    """
    token = ("--token-file", str(wiring.token_file)) if wiring.token_file else ()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pipelinerl_actor.generator"),
        *("--job", str(wiring.job_file), "--output", str(wiring.output)),
        *("--name", f"{wiring.name}-generator", "--listen", wiring.listen),
        *("--log-level", wiring.log_level, *token),
        *("--model", str(model), "--serve-initial", "--initial-version", str(step)),
        stdin=asyncio.subprocess.DEVNULL,
    )
    try:
        yield OwnGenerator(f"http://{wiring.listen}", process)
    finally:
        if not await stop(process, _STOP_S):
            log.warning("the generator had not ended %g s after its SIGTERM: killed", _STOP_S)
