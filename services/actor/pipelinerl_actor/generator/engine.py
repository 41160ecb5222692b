"""The interface of an inference engine, with its types. There are two engines: vLLM, and Hugging
Face transformers for numerics.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from pipelinerl_common.generator_api import InitGroupRequest, LoadResponse
from pipelinerl_common.settings import GeneratorSettings
from pipelinerl_common.types import VersionRun
from pipelinerl_weights.manifest import Manifest


class KVCache(StrEnum):
    """The treatment of the running sequences' KV cache at an update."""

    KEEP = "keep"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters of one sequence. `top_k` -1 and `top_p` 1 keep every token;
    temperature 0 takes the likeliest.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class EngineCompletion:
    """One sampled sequence.

    Example: token_ids (5, 9, 2), logprobs (-0.1, -2.3, -0.4), version_runs (VersionRun(6, 2),
    VersionRun(7, 1)).
    """

    text: str
    token_ids: tuple[int, ...]
    """Sampled tokens, an end-of-sequence token included."""
    logprobs: tuple[float, ...]
    """Log-probability of each sampled token under the distribution that it was drawn from: after
    temperature, top-k and top-p.
    """
    version_runs: tuple[VersionRun, ...]
    finish_reason: str
    """"stop", "length", or "abort" for what was sampled of a sequence that was stopped."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """The transfer of one version of the weights, which is about to begin."""

    version: int
    manifest: Manifest
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Received:
    """The outcome of a transfer that every worker of the engine has received."""

    checksum: str
    transfer_s: float
    """From being ready for the first bucket to having the last, of the slowest worker."""
    load_s: float
    """Time for loading and packing what was received, most of it during the transfer; of the
    slowest worker.
    """


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an engine is started with."""

    model: Path
    dtype: str
    head_dtype: str
    """`float32`, or `model` for the dtype of the weights."""
    max_model_len: int
    settings: GeneratorSettings
    initial_version: int
    can_stage: bool
    on_cpu: bool
    takes_updates: bool = True
    adapter_scale: float | None = None
    """alpha over rank, for updates that bring adapters; None where they bring whole weights."""
    engine_metrics: bool = True
    """Whether vLLM collects its own Prometheus metrics."""


class GeneratorEngine(Protocol):
    """Decodes, and receives weights. WeightUpdater is the only caller of the weight methods, one at
    a time and in the order that its module draws.

    A failure before `apply` or `receive_in_place` leaves the weights that decode as they are.
    """

    @property
    def num_workers(self) -> int: ...

    @property
    def can_stage(self) -> bool:
        """Whether memory is reserved for a second copy of the weights."""
        ...

    def load(self) -> LoadResponse:
        """The sequences under way, and what the decode steps have cost."""
        ...

    def running(self) -> AbstractAsyncContextManager[None]:
        """Starts the engine, warms it up and, at the end, stops it."""
        ...

    async def watch(self) -> None:
        """Waits for the end of the engine and raises FatalError then; runs until cancelled."""
        ...

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, stop: asyncio.Event | None = None
    ) -> EngineCompletion:
        """Samples one sequence. Cancelling it stops the decode; `stop` ends it with what was
        sampled.
        """
        ...

    async def score(self, token_ids: Sequence[int], start: int, temperature: float) -> list[float]:
        """Log-probabilities of token_ids[start:], each given all before it; `start` is >= 1."""
        ...

    async def join(self, group: InitGroupRequest) -> list[int]:
        """Makes every worker leave its old group and join this one, while decoding continues.
        Returns the workers' ranks.

        Raises TransferTimeout, TransferAborted or TransferFailed, as do `stage` and
        `receive_in_place`.
        """
        ...

    async def leave(self) -> None:
        """Makes every worker leave its group, if it has one."""
        ...

    async def stage(self, transfer: Transfer) -> Received:
        """Receives into the second copy while decoding continues."""
        ...

    async def back_up(self) -> None:
        """Copies the weights to host memory for `roll_back`, while decoding continues."""
        ...

    async def pause(self, kv_cache: KVCache) -> None:
        """Stops decoding at a token boundary, aborting no request. `recompute` drops all KV."""
        ...

    async def apply(self) -> None:
        """Makes the staged weights decode; needs a pause. An error leaves them undefined."""
        ...

    async def receive_in_place(self, transfer: Transfer) -> Received:
        """Receives into the weights that decode; needs a pause. An error leaves them undefined
        until `roll_back`.
        """
        ...

    async def roll_back(self) -> None:
        """Restores what `back_up` copied; needs a pause. An error leaves them undefined."""
        ...

    async def set_version(self, version: int) -> None:
        """Labels tokens with `version` from the next one on; needs a pause."""
        ...

    async def resume(self) -> None: ...
