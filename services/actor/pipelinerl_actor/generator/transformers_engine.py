"""Hugging Face transformers as the generator's engine: slow, small, and exact. For numerics, and to study the KV cache.

One thread decodes: round by round it takes every running sequence one token further. Between two rounds it looks for what else
is to be done (a pause, a command), so all sequences stand at a token boundary then.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from pipelinerl_actor.generator.background import TransferClock
from pipelinerl_actor.generator.engine import Completion, GroupSpec, KVCache, Received, Sampling, Transfer
from pipelinerl_actor.generator.transformers_model import Sequence as Decoding
from pipelinerl_actor.generator.transformers_model import TransformersModel
from pipelinerl_common.errors import FatalError
from pipelinerl_weights.group import TransferGroup
from pipelinerl_weights.manifest import Bucket
from pipelinerl_weights.receiver import receive, tensors_of

Result = TypeVar("Result")

_IDLE_S = 0.05


@dataclass(frozen=True, slots=True)
class TransformersOptions:
    model: Path
    dtype: str
    max_running_requests: int
    initial_version: int
    can_stage: bool
    device: str = "cpu"


@dataclass(eq=False, slots=True)
class _Job:
    """A sequence that a caller waits for."""

    sequence: Decoding
    done: "Future[Completion]"


class TransformersEngine:
    """See Engine. One worker."""

    def __init__(self, options: TransformersOptions) -> None:
        self._options = options
        self._model = TransformersModel(options.model, options.dtype, options.device)
        self._parameters: dict[str, Tensor] = dict(self._model.model.named_parameters(remove_duplicate=False))
        self._staged: dict[str, Tensor] = {}
        self._backup: dict[str, Tensor] = {}
        self._group: TransferGroup | None = None
        self._version = options.initial_version
        self._loop = _DecodeLoop(self._model, options.max_running_requests, lambda: self._version)

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

    async def watch(self) -> None:
        """The decoding thread ends only at a fault."""
        fault = await asyncio.wrap_future(self._loop.fault)
        raise FatalError(f"decoding ended: {fault}")

    async def generate(self, prompt_token_ids: Sequence[int], sampling: Sampling) -> Completion:
        job = _Job(self._model.start(list(prompt_token_ids), sampling), Future())
        self._loop.submit(job)
        return await asyncio.wrap_future(job.done)

    async def score(self, token_ids: Sequence[int], start: int, temperature: float) -> list[float]:
        return await self._loop.compute(lambda: self._model.score(list(token_ids), start, temperature))

    # Weights

    async def join(self, group: GroupSpec) -> list[int]:
        await self.leave()
        self._group = await asyncio.to_thread(
            TransferGroup.join, group.master_address, group.master_port,
            rank=group.rank_offset, world_size=group.world_size, backend=group.backend, epoch=group.epoch,
            timeout_s=group.timeout_s,
        )  # fmt: skip
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
        await self._loop.call(lambda: [self._overwrite(name, tensor) for name, tensor in self._backup.items()])

    async def set_version(self, version: int) -> None:
        self._version = version

    async def resume(self) -> None:
        self._loop.resume()

    def _receive(self, transfer: Transfer, take: Callable[[str, Tensor], None]) -> Received:
        if self._group is None:
            raise RuntimeError("this worker is in no group")
        clock = TransferClock()

        def load(bucket: Bucket, buffer: Tensor) -> None:
            clock.bucket_arrived()
            with clock.loading():
                for name, tensor in tensors_of(bucket, buffer):
                    if name in self._parameters:
                        take(name, tensor)

        clock.ready()
        checksum = receive(
            self._group, transfer.manifest, transfer.version, transfer.timeout_s, load, device=self._options.device
        )
        return Received(checksum, **clock.seconds())

    @torch.no_grad()
    def _overwrite(self, name: str, tensor: Tensor) -> None:
        self._parameters[name].copy_(tensor)

    def _swap_in(self) -> None:
        for name, tensor in self._staged.items():
            self._parameters[name].data = tensor
        self._staged = {}

    def _copies(self) -> dict[str, Tensor]:
        return {name: parameter.detach().to("cpu", copy=True) for name, parameter in self._parameters.items()}


class _DecodeLoop:
    """The decoding thread and the commands to it."""

    def __init__(self, model: TransformersModel, max_running: int, version: Callable[[], int]) -> None:
        self._model = model
        self._max_running = max_running
        self._version = version
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: list[_Job] = []
        self._waiting: list[_Job] = []
        self._computations: list[Callable[[], None]] = []
        self._paused = False
        self._stopping = False
        self.fault: Future[str] = Future()
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._commands.put(self._stop)
        self._thread.join()

    def submit(self, job: _Job) -> None:
        self._commands.put(lambda: self._waiting.append(job))

    async def call(self, function: Callable[[], Result]) -> Result:
        """Runs it on the decoding thread, between two tokens, also during a pause."""
        command, done = _answered(function)
        self._commands.put(command)
        return await asyncio.wrap_future(done)

    async def compute(self, function: Callable[[], Result]) -> Result:
        """Runs what uses the weights, never during a pause."""
        command, done = _answered(function)
        self._commands.put(lambda: self._computations.append(command))
        return await asyncio.wrap_future(done)

    async def pause(self) -> None:
        def command() -> None:
            self._paused = True

        await self.call(command)

    def resume(self) -> None:
        def command() -> None:
            self._paused = False

        self._commands.put(command)

    def drop_caches(self) -> None:
        for job in self._running:
            job.sequence.cache = None

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._obey()
                self._admit()
                if not self._paused:
                    self._round()
        except Exception as error:  # noqa: BLE001 - `watch` raises it
            self.fault.set_result(f"{type(error).__name__}: {error}")
        for job in self._running + self._waiting:
            if job.done.set_running_or_notify_cancel():
                job.done.set_exception(FatalError("decoding ended"))

    def _obey(self) -> None:
        """Everything that was asked for; waits a moment when there is nothing else to do."""
        idle = self._paused or not (self._running or self._waiting or self._computations)
        try:
            self._commands.get(timeout=_IDLE_S if idle else 0)()
            while not self._stopping:
                self._commands.get_nowait()()
        except queue.Empty:
            pass

    def _admit(self) -> None:
        self._waiting = [job for job in self._waiting if not job.done.cancelled()]
        while self._waiting and len(self._running) < self._max_running and not self._paused:
            self._running.append(self._waiting.pop(0))

    def _round(self) -> None:
        """What waits to be computed, then one token for every running sequence."""
        computations, self._computations = self._computations, []
        for command in computations:
            command()
        still: list[_Job] = []
        version = self._version()
        for job in self._running:
            if job.done.cancelled():
                continue
            self._model.step(job.sequence, version)
            if job.sequence.finish_reason is None:
                still.append(job)
            elif job.done.set_running_or_notify_cancel():
                job.done.set_result(job.sequence.completion())
        self._running = still


def _answered(function: Callable[[], Result]) -> tuple[Callable[[], None], "Future[Result]"]:
    """`function` as a command whose result or error goes into the future."""
    done: Future[Result] = Future()

    def command() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(function())
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            done.set_exception(error)

    return command, done
