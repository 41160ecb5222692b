"""The weights bench's generator: the product's own process with a model folder, and completions
that keep it busy.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from bench import children
from bench.report import progress
from bench.weights_model import MAX_MODEL_LEN
from pipelinerl_common.errors import PipelineRLError, Refused, Unavailable

START_TIMEOUT_S, CALL_TIMEOUT_S, POLL_S = 300.0, 300.0, 0.1
COMPLETION_TOKENS = MAX_MODEL_LEN - 64
KV_CACHE_BYTES = 256 << 20


class Generator:
    """A running generator. Calls raise Refused with its answer when it says no and Unavailable when
    it is gone.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._session = session

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """One control call; the answer's JSON."""
        try:
            async with self._session.post(self.url + path, json=body) as response:
                if response.status != 200:
                    raise Refused(
                        f"{path} answers {response.status}: {(await response.text())[:2000]}"
                    )
                answer: dict[str, Any] = await response.json()
                return answer
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unavailable(f"{path} at {self.url}: {error!r}") from error

    async def num_running(self) -> int:
        """Requests that are being decoded now."""
        async with self._session.get(self.url + "/weights") as response:
            response.raise_for_status()
            return int((await response.json())["num_running"])

    async def is_healthy(self) -> bool:
        try:
            async with self._session.get(self.url + "/health") as response:
                return response.status == 200
        except aiohttp.ClientConnectionError:
            return False

    @asynccontextmanager
    async def busy(self, num_requests: int) -> AsyncIterator[None]:
        """Inside, `num_requests` completions are being decoded all the time; one that fails ends
        the block with its error.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                workers = [
                    tasks.create_task(self._complete_for_ever()) for _ in range(num_requests)
                ]
                yield
                for worker in workers:
                    worker.cancel()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures

    async def wait_until_running(self, num_requests: int) -> None:
        """Returns when so many requests are being decoded. Raises Unavailable after CALL_TIMEOUT_S."""
        deadline = time.monotonic() + CALL_TIMEOUT_S
        while await self.num_running() < num_requests:
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"{self.url} does not run {num_requests} requests at once after "
                    f"{CALL_TIMEOUT_S:g} s"
                )
            await asyncio.sleep(POLL_S)

    async def _complete_for_ever(self) -> None:
        body = {
            "prompt_token_ids": [5, 40, 41, 6],
            "max_tokens": COMPLETION_TOKENS,
            "temperature": 1.0,
            "ignore_eos": True,
        }
        while True:
            await self.post("/v1/chat/completions", body)


@asynccontextmanager
async def running_generator(
    folder: Path, engine: str, num_requests: int
) -> AsyncIterator[Generator]:
    """Starts the generator of the model in `folder`/model. Raises Unavailable with its log's end
    when it does not come up.
    """
    job_file, log, port = folder / "job.yaml", folder / "generator.log", children.free_port()
    job_file.write_text(yaml.safe_dump(_job(folder, engine, num_requests)))
    argv = [
        sys.executable,
        "-m",
        "pipelinerl_actor.generator",
        "--job",
        str(job_file),
        "--name",
        "generator-0",
    ]
    argv += ["--output", str(folder), "--listen", f"127.0.0.1:{port}", "--serve-initial"]
    timeout = aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)
    connector = aiohttp.TCPConnector(force_close=True)
    async with (
        children.running(argv, log) as process,
        aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
    ):
        generator = Generator(f"http://127.0.0.1:{port}", session)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not await generator.is_healthy():
            if process.returncode is not None or time.monotonic() > deadline:
                raise Unavailable(
                    f"the generator does not come up; its log ends: {children.log_tail(log)}"
                )
            await asyncio.sleep(POLL_S)
        try:
            yield generator
        except PipelineRLError:
            progress(f"the generator's log ends: {children.log_tail(log)}")
            raise


def _job(folder: Path, engine: str, num_requests: int) -> dict[str, Any]:
    generator = {
        "engine": engine,
        "maxRunningRequests": num_requests + 2,
        "kvCacheBytes": KV_CACHE_BYTES,
    }
    return {
        "apiVersion": "pipelinerl.dev/v1alpha1",
        "kind": "PipelineRLJob",
        "metadata": {"name": "bench"},
        "spec": {
            "model": {
                "uri": str(folder / "model"),
                "dtype": "float32",
                "maxModelLen": MAX_MODEL_LEN,
            },
            "task": {
                "path": "pipelinerl_actor.tasks.arithmetic:Arithmetic",
                "sampling": {"maxTokens": COMPLETION_TOKENS},
            },
            "actors": {"generator": generator},
            "weightTransfer": {"backend": "gloo"},
        },
    }
