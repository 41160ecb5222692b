"""What the generator needs of an inference engine. Two exist: vLLM, and Hugging Face transformers
for numerics.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from pipelinerl_actor.generator.metrics import EngineLoad
from pipelinerl_common.types import VersionRun
from pipelinerl_weights.manifest import Manifest


class KVCache(StrEnum):
    """What happens to the KV cache of running sequences at an update."""

    KEEP = "keep"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one sequence is sampled. `top_k` -1 and `top_p` 1 leave every token in; temperature 0
    takes the likeliest.
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
    """Of each sampled token under the distribution it was drawn from (after temperature, top-k and
    top-p).
    """
    version_runs: tuple[VersionRun, ...]
    finish_reason: str
    """"stop", "length", or "abort" for what was sampled of a sequence that was stopped."""
    num_cached_tokens: int = 0
    """Of the prompt, found in the prefix cache."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The weight-transfer group to join; worker i has rank `rank_offset` + i."""

    epoch: int
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    backend: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """One version that is about to arrive."""

    version: int
    manifest: Manifest
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Received:
    """What every worker of the engine received."""

    checksum: str
    transfer_s: float
    """From being ready for the first bucket to having the last, the slowest worker's."""
    load_s: float
    """Spent on loading and packing what was received, the slowest worker's; most of it during the
    transfer.
    """


class GeneratorEngine(Protocol):
    """Decodes, and takes weights. The weight verbs are called by one caller at a time, in the order
    that updater.py gives.

    Nothing that fails before `apply` or `receive_in_place` changes the weights that decode.
    """

    @property
    def num_workers(self) -> int: ...

    @property
    def can_stage(self) -> bool:
        """Whether memory for a second copy of the weights was set aside."""
        ...

    def load(self) -> EngineLoad:
        """How full it is, and what its steps have cost."""
        ...

    def running(self) -> AbstractAsyncContextManager[None]:
        """Starts the engine, warms it up and, at the end, stops it."""
        ...

    async def watch(self) -> None:
        """Returns never; raises FatalError when the engine dies."""
        ...

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, stop: asyncio.Event | None = None
    ) -> EngineCompletion:
        """Samples one sequence. Cancelling it stops the decode, and so does `stop`, which leaves
        what was sampled.
        """
        ...

    async def score(self, token_ids: Sequence[int], start: int, temperature: float) -> list[float]:
        """Log-probabilities of token_ids[start:], each given all before it. `start` is at least 1."""
        ...

    async def join(self, group: GroupSpec) -> list[int]:
        """Every worker joins the group, leaving its old one; decoding goes on. Returns the workers'
        ranks.

        Raises TransferTimeout, TransferAborted or TransferFailed, as do `stage` and
        `receive_in_place`.
        """
        ...

    async def leave(self) -> None:
        """Every worker leaves its group, if it has one."""
        ...

    async def stage(self, transfer: Transfer) -> Received:
        """Receives into the second copy while decoding goes on."""
        ...

    async def back_up(self) -> None:
        """Keeps a copy of the present weights for `roll_back`, off the device, while decoding goes
        on.
        """
        ...

    async def pause(self, kv_cache: KVCache) -> None:
        """Stops at a token boundary. No request is aborted. `recompute` drops all KV."""
        ...

    async def apply(self) -> None:
        """Paused: makes the staged weights the ones that decode. An error leaves them undefined."""
        ...

    async def receive_in_place(self, transfer: Transfer) -> Received:
        """Paused: receives into the weights that decode. An error leaves them undefined until
        `roll_back`.
        """
        ...

    async def roll_back(self) -> None:
        """Paused: restores what `back_up` kept. An error leaves the weights undefined."""
        ...

    async def set_version(self, version: int) -> None:
        """Paused: tokens are labelled with `version` from the next one on."""
        ...

    async def resume(self) -> None: ...
