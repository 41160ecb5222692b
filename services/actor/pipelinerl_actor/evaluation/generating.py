"""A generator of the evaluator's own, which serves one folder's weights and ends with the block."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pipelinerl_actor.evaluation.session import until_ready
from pipelinerl_common.errors import Unavailable
from pipelinerl_common.service import Wiring

log = logging.getLogger(__name__)

_STOP_S = 30.0
"""An engine takes its time to end, and one that is killed may leave workers behind."""


@dataclass(frozen=True, slots=True)
class OwnGenerator:
    url: str
    process: asyncio.subprocess.Process

    async def until_ready(self) -> None:
        """Returns when it serves; the deadline is the caller's. Raises Unavailable when it ends
        before.
        """
        await until_ready(self.url, None, lambda: self.process.returncode is None)

    async def ended(self) -> None:
        """Waits for its end, which is always too early. Raises Unavailable."""
        raise Unavailable(
            f"the generator ended with status {await self.process.wait()} while it was needed"
        )


@asynccontextmanager
async def generator(wiring: Wiring, model: Path, step: int) -> AsyncIterator[OwnGenerator]:
    """Started to serve `model` as version `step`, on the evaluator's own address. What it logs is
    in the evaluator's log.
    """
    token = ("--token-file", str(wiring.token_file)) if wiring.token_file else ()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pipelinerl_actor.generator"),
        *(
            "--job",
            str(wiring.job_file),
            "--output",
            str(wiring.output),
            "--name",
            f"{wiring.name}-generator",
        ),
        *("--listen", wiring.listen, "--log-level", wiring.log_level, *token),
        *("--model", str(model), "--serve-initial", "--initial-version", str(step)),
        stdin=asyncio.subprocess.DEVNULL,
    )
    try:
        yield OwnGenerator(f"http://{wiring.listen}", process)
    finally:
        await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    except TimeoutError:
        log.warning("the generator has not ended %g s after it was told to, and is killed", _STOP_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
