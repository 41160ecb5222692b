"""The generator of the weights bench: the product's own process, completions that keep it busy, and
its model, a random Qwen3 in float32 of a given size with the tiny model's tokenizer.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.processes import running, tail
from bench.report import progress
from pipelinerl_cli.up.placement import Ports
from pipelinerl_common.errors import PipelineRLError, Unavailable
from pipelinerl_common.generator_api import CompletionRequest
from pipelinerl_common.generator_client import GeneratorClient, GeneratorUnavailable

HIDDEN, INTERMEDIATE, HEADS, KEY_VALUE_HEADS, HEAD_DIM = 768, 2048, 12, 4, 64
MAX_MODEL_LEN = 1024
FLOAT32_BYTES = 4
MEGABYTE = 1_000_000
START_TIMEOUT_S, CALL_TIMEOUT_S, POLL_S = 300.0, 300.0, 0.1
COMPLETION_TOKENS = MAX_MODEL_LEN - 64
KV_CACHE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class BusyGenerator:
    """A running generator, and the requests that keep it busy."""

    client: GeneratorClient

    @asynccontextmanager
    async def busy(self, num_requests: int) -> AsyncIterator[None]:
        """Inside, `num_requests` completions are being decoded all the time; one that fails ends
        the block with its error.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                workers = [
                    tasks.create_task(self._complete_repeatedly()) for _ in range(num_requests)
                ]
                yield
                for worker in workers:
                    worker.cancel()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures

    async def wait_until_running(self, num_requests: int) -> None:
        """Waits until so many requests are decoded. Raises Unavailable after CALL_TIMEOUT_S."""
        deadline = time.monotonic() + CALL_TIMEOUT_S
        while (await self.client.weights(CALL_TIMEOUT_S)).num_running < num_requests:
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"{self.client.url} does not run {num_requests} requests at once after "
                    f"{CALL_TIMEOUT_S:g} s"
                )
            await asyncio.sleep(POLL_S)

    async def _complete_repeatedly(self) -> None:
        request = CompletionRequest(
            prompt_token_ids=[5, 40, 41, 6],
            max_tokens=COMPLETION_TOKENS,
            temperature=1.0,
            ignore_eos=True,
        )
        while True:
            await self.client.complete(request, CALL_TIMEOUT_S)


async def _is_healthy(client: GeneratorClient) -> bool:
    try:
        await client.check_health(CALL_TIMEOUT_S)
    except GeneratorUnavailable:
        return False
    return True


@asynccontextmanager
async def running_generator(
    folder: Path, engine: str, num_requests: int
) -> AsyncIterator[BusyGenerator]:
    """Starts the generator of the model in `folder`/model. Raises Unavailable with its log's end
    when it does not come up.
    """
    job_file = folder / "job.yaml"
    job_file.write_text(yaml.safe_dump(_job(folder, engine, num_requests)))
    async with AsyncExitStack() as stack:
        address = stack.enter_context(Ports()).address()
        argv = (
            *("python", "-m", "pipelinerl_actor.generator", "--job", str(job_file)),
            *("--name", "generator-0", "--output", str(folder)),
            *("--listen", address, "--serve-initial"),
        )
        process = await stack.enter_async_context(running(argv, folder / "generator.log"))
        client = GeneratorClient(f"http://{address}")
        deadline = time.monotonic() + START_TIMEOUT_S
        while not await _is_healthy(client):
            if process.exit_status is not None or time.monotonic() > deadline:
                raise Unavailable(f"the generator does not come up; its log ends: {tail(process)}")
            await asyncio.sleep(POLL_S)
        try:
            yield BusyGenerator(client)
        except PipelineRLError:
            progress(f"the generator's log ends: {tail(process)}")
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


def num_layers(megabytes: int) -> int:
    """Decoder layers that come to `megabytes` of float32 weights or a little more; one layer is 25
    MB.
    """
    attention = HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KEY_VALUE_HEADS)
    layer_bytes = FLOAT32_BYTES * (attention + 3 * HIDDEN * INTERMEDIATE)
    return -(-megabytes * MEGABYTE // layer_bytes)


def make_model(folder: Path, megabytes: int, seed: int) -> None:
    """Writes the model into `folder`, in Hugging Face format."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    from pipelinerl_actor.models import tiny

    logging.disable_progress_bar()
    config = Qwen3Config(
        vocab_size=tiny.VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=num_layers(megabytes),
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tiny.SPECIAL_TOKENS.index(tiny.END),
        pad_token_id=tiny.SPECIAL_TOKENS.index(tiny.PAD),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tiny.save(Qwen3ForCausalLM(config).float(), folder)
