"""vLLM as the generator's engine, in process: no second HTTP server, no fork.

    AsyncLLM (this process)
        -> engine core (own process: schedules, decodes)
            -> workers (vllm_worker.GeneratorWorker)

The engine core labels every step's tokens with the weight version that was set while it was paused,
so version runs are exact.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import astuple, dataclass, field
from typing import Any

from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import PrometheusStatLogger

from pipelinerl_actor.generator.engine import (
    EngineCompletion,
    EngineOptions,
    KVCache,
    Received,
    Sampling,
    Transfer,
)
from pipelinerl_actor.generator.metrics import StepClock
from pipelinerl_actor.generator.vllm_options import engine_args
from pipelinerl_actor.generator.worker_thread import WorkerReports
from pipelinerl_common.errors import FatalError
from pipelinerl_common.generator_api import InitGroupRequest, LoadResponse
from pipelinerl_common.types import VersionRun
from pipelinerl_weights.manifest import Manifest


class StepStats(PrometheusStatLogger):  # type: ignore[misc] # vLLM ships no types
    """Reports every step of vLLM's scheduler to a StepClock, and to vLLM's own Prometheus metrics
    when they are enabled: they cost time at each step.

    vLLM makes the object itself, so both belong to a class made for one engine:
    `StepStats.feeding(clock, own_metrics=True)`.
    """

    clock: StepClock
    own_metrics: bool

    @classmethod
    def feeding(cls, clock: StepClock, *, own_metrics: bool) -> type["StepStats"]:
        return type("EngineStepStats", (cls,), {"clock": clock, "own_metrics": own_metrics})

    def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
        if self.own_metrics:
            super().__init__(vllm_config, engine_indexes)

    def log_engine_initialized(self) -> None:
        if self.own_metrics:
            super().log_engine_initialized()

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if self.own_metrics:
            super().record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
        if scheduler_stats is None:
            return
        self.clock.stepped(
            num_running=scheduler_stats.num_running_reqs,
            num_waiting=scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
            kv_usage=scheduler_stats.kv_cache_usage,
            num_tokens=iteration_stats.num_generation_tokens if iteration_stats else 0,
            num_prefilled=iteration_stats.prompt_token_stats.computed if iteration_stats else 0,
            num_preempted=iteration_stats.num_preempted_reqs if iteration_stats else 0,
        )


_WATCH_S = 1.0
_GRACE_S = 30.0
"""After a transfer's own deadline: a worker that has not ended by then cannot be trusted."""
_ABORT_AGAIN_S = 0.05
_NEVER = 1 << 30
_WARM_UP_TOKENS = 4


@dataclass(eq=False, slots=True)
class _Request:
    """One sequence in vLLM."""

    stop: asyncio.Event | None
    request_id: str = ""
    """Id of the present attempt in vLLM."""
    begun: bool = False
    """Whether a token of it was sampled."""
    restart: asyncio.Event = field(default_factory=asyncio.Event)


class VllmEngine:
    """A GeneratorEngine whose workers are vllm_worker.GeneratorWorker."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._llm: AsyncLLM | None = None
        self._ids = itertools.count()
        self._requests: set[_Request] = set()
        self._manifest: Manifest | None = None
        """The manifest that the workers have."""
        self._num_updates = 0
        self._reports = WorkerReports(options.settings.tensor_parallel_size)
        self._clock = StepClock(kv_tokens=0)

    @property
    def num_workers(self) -> int:
        return self._options.settings.tensor_parallel_size

    @property
    def can_stage(self) -> bool:
        return self._options.can_stage

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Starts vLLM, which takes many seconds. Raises SettingsError for refused arguments."""
        stats = StepStats.feeding(self._clock, own_metrics=self._options.engine_metrics)
        self._llm = AsyncLLM.from_engine_args(
            engine_args(self._options),
            stat_loggers=[stats],
            # vLLM's own server has larger defaults on large GPUs, such as the tokens of one step.
            usage_context=UsageContext.OPENAI_API_SERVER,
        )
        cache = self._llm.vllm_config.cache_config
        self._clock.kv_tokens, self._clock.kv_block_tokens = (
            (cache.num_gpu_blocks or 0) * cache.block_size,
            cache.block_size,
        )
        try:
            await self.set_version(self._options.initial_version)
            await self.generate([0], Sampling(max_tokens=_WARM_UP_TOKENS, ignore_eos=True))
            async with self._reports.listening():
                yield
        finally:
            llm, self._llm = self._llm, None
            if llm.output_handler is not None:
                # It would report the end of the engine core as a crash.
                llm.output_handler.cancel()
            await asyncio.to_thread(llm.shutdown)

    def load(self) -> LoadResponse:
        if not self._requests:
            self._clock.emptied()
        return self._clock.load()

    async def watch(self) -> None:
        """Polls the engine core's state, since its end raises nothing while no request runs."""
        while True:
            if self._engine.errored:
                raise FatalError("the vLLM engine died; see its log above")
            await asyncio.sleep(_WATCH_S)

    @property
    def _engine(self) -> AsyncLLM:
        if self._llm is None:
            raise FatalError("the vLLM engine is not running")
        return self._llm

    # Decoding

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, stop: asyncio.Event | None = None
    ) -> EngineCompletion:
        request = _Request(stop)
        self._requests.add(request)
        try:
            while True:
                output = await self._attempt(
                    request, list(prompt_token_ids), _sampling_params(sampling)
                )
                if output is not None:
                    return _completion(output.outputs[0], output.num_cached_tokens or 0)
        finally:
            self._requests.discard(request)

    async def _attempt(
        self, request: _Request, prompt: list[int], params: SamplingParams
    ) -> RequestOutput | None:
        """None when the weights changed before the first token: the request must start again, since
        it may have taken blocks of the old weights from the prefix cache.
        """
        request.restart.clear()
        reader = asyncio.ensure_future(self._read(request, prompt, params))
        restarts = (
            [asyncio.ensure_future(request.restart.wait())]
            if self._options.settings.prefix_caching
            else []
        )
        stops = [asyncio.ensure_future(request.stop.wait())] if request.stop is not None else []
        try:
            await asyncio.wait([reader, *restarts, *stops], return_when=asyncio.FIRST_COMPLETED)
            while not reader.done() and request.stop is not None and request.stop.is_set():
                # Repeated, because vLLM may not have received the request yet.
                await self._engine.abort(request.request_id)
                await asyncio.wait([reader], timeout=_ABORT_AGAIN_S)
            return reader.result() if reader.done() else None
        finally:
            # The reader is awaited too, since its cancellation aborts the request in vLLM.
            for waiting in (*restarts, *stops, reader):
                waiting.cancel()
            await asyncio.wait([reader])

    async def _read(
        self, request: _Request, prompt: list[int], params: SamplingParams
    ) -> RequestOutput:
        # One salt per set of weights: blocks that older weights computed are never found. Clearing
        # the cache instead would also drop the KV of running sequences.
        tokens = tokens_input(prompt, cache_salt=f"update-{self._num_updates}")
        request.request_id = f"g{next(self._ids)}"
        return await self._last_output(
            self._engine.generate(tokens, params, request.request_id), request
        )

    async def _last_output(
        self, outputs: AsyncGenerator[RequestOutput, None], request: _Request
    ) -> RequestOutput:
        """The last output, which is the finished one. Cancelling it aborts the request in vLLM."""
        last: RequestOutput | None = None
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    last = output
                    request.begun = True
        except EngineDeadError as error:
            raise FatalError("the vLLM engine died; see its log above") from error
        assert last is not None
        return last

    async def score(self, token_ids: Sequence[int], start: int, temperature: float) -> list[float]:
        params = SamplingParams(
            max_tokens=1,
            temperature=temperature,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            ignore_eos=True,
        )
        outputs = self._engine.generate(
            tokens_input(list(token_ids)), params, f"s{next(self._ids)}"
        )
        last = await self._last_output(outputs, _Request(stop=None))
        assert last.prompt_logprobs is not None
        return [
            last.prompt_logprobs[at][token].logprob
            for at, token in enumerate(token_ids)
            if at >= start
        ]

    # Weights

    async def join(self, group: InitGroupRequest) -> list[int]:
        results = await self._in_background("weights_join", group.timeout_s, group.model_dump())
        return [int(result["rank"]) for result in results]

    async def leave(self) -> None:
        await self._call("weights_leave")

    async def stage(self, transfer: Transfer) -> Received:
        return await self._receive("weights_stage", transfer)

    async def back_up(self) -> None:
        await self._in_background("weights_back_up", _GRACE_S)

    async def receive_in_place(self, transfer: Transfer) -> Received:
        return await self._receive("weights_receive_in_place", transfer)

    async def pause(self, kv_cache: KVCache) -> None:
        # `clear_cache` recomputes the KV of every running sequence, whatever its name says.
        await self._engine.engine_core.pause_scheduler_async(
            mode="keep", clear_cache=kv_cache is KVCache.RECOMPUTE
        )
        self._clock.interrupted()

    async def resume(self) -> None:
        await self._engine.resume_generation()

    async def apply(self) -> None:
        await self._call("weights_apply")

    async def roll_back(self) -> None:
        await self._call("weights_roll_back")

    async def set_version(self, version: int) -> None:
        await self._engine.update_weight_version(str(version))
        self._num_updates += 1
        for request in self._requests:
            if not request.begun:
                request.restart.set()

    async def _receive(self, method: str, transfer: Transfer) -> Received:
        if transfer.manifest is not self._manifest:
            await self._call("weights_manifest", transfer.manifest.to_json())
            self._manifest = transfer.manifest
        results = await self._in_background(
            method, transfer.timeout_s, transfer.version, transfer.timeout_s
        )
        checksums = {str(result["checksum"]) for result in results}
        if len(checksums) != 1:
            raise RuntimeError(
                f"the workers received different bytes: checksums {sorted(checksums)}"
            )
        transfer_s, load_s = (
            max(float(result[key]) for result in results) for key in ("transfer_s", "load_s")
        )
        return Received(checksums.pop(), transfer_s, load_s)

    async def _in_background(
        self, method: str, timeout_s: float, *arguments: Any
    ) -> list[dict[str, Any]]:
        """Starts work on the thread of every worker and waits until all have ended. Raises what a
        worker raised.
        """
        try:
            return await self._reports.collect(
                lambda ticket: self._call(method, astuple(ticket), *arguments), timeout_s + _GRACE_S
            )
        except TimeoutError as error:
            raise FatalError(
                f"a worker did not end {method} {_GRACE_S:g} s after its deadline"
            ) from error

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        try:
            results: list[Any] = await self._engine.collective_rpc(method, args=arguments)
        except EngineDeadError as error:
            raise FatalError("the vLLM engine died; see its log above") from error
        return results


def _sampling_params(sampling: Sampling) -> SamplingParams:
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(0, sampling.top_k),
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        seed=sampling.seed,
        ignore_eos=sampling.ignore_eos,
        logprobs=0,
        flat_logprobs=True,
        stream_interval=_NEVER,  # the first token and the end, nothing in between
    )


def _completion(output: CompletionOutput, num_cached_tokens: int) -> EngineCompletion:
    token_ids = tuple(output.token_ids)
    logprobs: Any = output.logprobs
    spans = output.weight_versions or []
    return EngineCompletion(
        text=output.text,
        token_ids=token_ids,
        logprobs=tuple(
            logprobs.logprobs[logprobs.start_indices[at]] for at in range(len(token_ids))
        ),
        version_runs=tuple(VersionRun(int(span.version), span.end - span.start) for span in spans),
        finish_reason=str(output.finish_reason),
        num_cached_tokens=num_cached_tokens,
    )
