"""Hugging Face transformers as the generator's engine: slow, small, and exact; for numerics, and to
study the KV cache.

Weights are received on another thread than the one that decodes (transformers_decoder.py), which
puts them in place between two tokens.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from pipelinerl_actor.generator.engine import (
    EngineCompletion,
    EngineOptions,
    KVCache,
    Received,
    Sampling,
    Transfer,
)
from pipelinerl_actor.generator.merged_weights import MergedWeights
from pipelinerl_actor.generator.metrics import TransferClock
from pipelinerl_actor.generator.transformers_decoder import (
    DecodeJob,
    DecodeLoop,
    Observer,
    TransformersModel,
)
from pipelinerl_actor.generator.weight_layout import WeightLayout
from pipelinerl_common.errors import FatalError, SettingsError
from pipelinerl_common.generator_api import InitGroupRequest, LoadResponse
from pipelinerl_weights.group import TransferGroup
from pipelinerl_weights.nccl import on_transfer_stream
from pipelinerl_weights.slices import whole_tensors
from pipelinerl_weights.snapshot import TensorAssembly
from pipelinerl_weights.transfer import receive


class TransformersEngine:
    """A GeneratorEngine with one worker, in this process."""

    def __init__(self, options: EngineOptions, observe: Observer | None = None) -> None:
        """`observe` is called on the decoding thread, before every token."""
        self._options = options
        self._model = TransformersModel(options, observe)
        self._parameters: dict[str, Tensor] = dict(
            self._model.model.named_parameters(remove_duplicate=False)
        )
        scale = options.adapter_scale
        self._merged = None if scale is None else MergedWeights(options.model, scale)
        if options.takes_updates and self._merged is None:
            _check_names(self._model.model, options.model)
        self._staged: dict[str, Tensor] = {}
        self._backup: dict[str, Tensor] = {}
        self._group: TransferGroup | None = None
        self._version = options.initial_version
        self._loop = DecodeLoop(
            self._model, options.settings.max_running_requests, lambda: self._version
        )

    @property
    def num_workers(self) -> int:
        return 1

    @property
    def can_stage(self) -> bool:
        return self._options.can_stage

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._loop.start()
        try:
            await self.generate([0], Sampling(max_tokens=2, ignore_eos=True))
            yield
        finally:
            await asyncio.to_thread(self._loop.stop)
            await self.leave()

    def load(self) -> LoadResponse:
        return self._loop.clock.load()

    async def watch(self) -> None:
        """Waits for a fault of the decoding thread; the thread ends without one only at `stop`."""
        fault = await asyncio.wrap_future(self._loop.fault)
        raise FatalError(f"decoding ended: {fault}")

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, stop: asyncio.Event | None = None
    ) -> EngineCompletion:
        job = DecodeJob(self._model.start(list(prompt_token_ids), sampling), Future(), stop)
        self._loop.submit(job)
        return await asyncio.wrap_future(job.done)

    async def advance(self, num_tokens: int) -> None:
        """During a pause: samples so many tokens of every sequence and pauses again, so that
        updates fall on chosen tokens.
        """
        await self._loop.advance(num_tokens)

    async def score(self, token_ids: Sequence[int], start: int, temperature: float) -> list[float]:
        return await self._loop.compute(
            lambda: self._model.score(list(token_ids), start, temperature)
        )

    # Weights

    async def join(self, group: InitGroupRequest) -> list[int]:
        await self.leave()
        self._group = await asyncio.to_thread(
            TransferGroup.join,
            group.master_address,
            group.master_port,
            rank=group.rank_offset,
            world_size=group.world_size,
            backend=group.backend,
            epoch=group.epoch,
            timeout_s=group.timeout_s,
            device=self._model.device,
        )
        return [group.rank_offset]

    async def leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            await asyncio.to_thread(group.close)

    async def stage(self, transfer: Transfer) -> Received:
        self._staged = {}

        def keep(name: str, tensor: Tensor) -> None:
            self._staged[name] = tensor.to(self._parameters[name].dtype, copy=True)

        return await asyncio.to_thread(self._receive, transfer, keep)

    async def back_up(self) -> None:
        self._backup = await asyncio.to_thread(self._copies)

    async def pause(self, kv_cache: KVCache) -> None:
        await self._loop.pause()
        if kv_cache is KVCache.RECOMPUTE:
            await self._loop.call(self._loop.drop_caches)

    async def apply(self) -> None:
        await self._loop.call(self._swap_in)

    async def receive_in_place(self, transfer: Transfer) -> Received:
        return await asyncio.to_thread(self._receive, transfer, self._overwrite)

    async def roll_back(self) -> None:
        await self._loop.call(
            lambda: [self._overwrite(name, tensor) for name, tensor in self._backup.items()]
        )

    async def set_version(self, version: int) -> None:
        self._version = version

    async def resume(self) -> None:
        self._loop.resume()

    def _receive(self, transfer: Transfer, take: Callable[[str, Tensor], None]) -> Received:
        if self._group is None:
            raise RuntimeError("this worker is in no group")
        adapter: dict[str, Tensor] = {}

        def load(tensors: Iterable[tuple[str, Tensor]]) -> None:
            clock.arrived()
            with clock.loading():
                for name, tensor in tensors:
                    if self._merged is not None:
                        adapter[name] = tensor
                    elif name in self._parameters:
                        take(name, tensor)

        clock, manifest = TransferClock(), transfer.manifest
        sink = TensorAssembly(manifest, load, whole_tensors(manifest), self._group.device)
        with on_transfer_stream(self._group.device):
            checksum = receive(self._group, manifest, transfer.version, transfer.timeout_s, sink)
            if self._merged is not None:
                # Only now: a layer needs both halves of its adapter, which may come apart.
                with clock.loading():
                    for name, tensor in self._merged.of(adapter):
                        take(name, tensor)
        return Received(checksum, **clock.seconds())

    @torch.no_grad()
    def _overwrite(self, name: str, tensor: Tensor) -> None:
        self._parameters[name].copy_(tensor)

    def _swap_in(self) -> None:
        for name, tensor in self._staged.items():
            self._parameters[name].data = tensor
        self._staged = {}

    def _copies(self) -> dict[str, Tensor]:
        return {
            name: parameter.detach().to("cpu", copy=True)
            for name, parameter in self._parameters.items()
        }


def _check_names(model: nn.Module, folder: Path) -> None:
    """Raises SettingsError when a weight has another name in memory than in the checkpoint, by
    which updates address it.
    """
    stored = WeightLayout.of_folder(folder).shapes
    unknown = sorted(name for name, _ in model.named_parameters() if name not in stored)
    if unknown:
        raise SettingsError(
            f"generator.engine=transformers: {len(unknown)} weights have another name in the "
            f"checkpoint than in memory, such as {unknown[0]}, so that no update would reach them, "
            "as the experts of a mixture: use engine vllm"
        )
