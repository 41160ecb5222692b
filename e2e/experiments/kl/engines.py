"""The project's engines, with weights that are replaced while they decode, after chosen tokens.

Checkpoints travel as in a job: packed into a snapshot, broadcast over a weight-transfer group,
received and staged by the engine while it decodes, swapped in during a pause. Verbs and their order
are those of the generator's updater.py.

Shape suffixes: N sequences, P tokens of a prompt, T sampled tokens, S both, V vocabulary.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.kl import divergence
from experiments.kl.policy_sequence import PERIOD, PolicySequence, Weights, sampling_model
from pipelinerl_actor.generator.engine import (
    EngineCompletion,
    EngineOptions,
    GeneratorEngine,
    KVCache,
    Sampling,
    Transfer,
)
from pipelinerl_actor.generator.service import make_engine
from pipelinerl_actor.generator.transformers_decoder import DecodedSequence as Decoded
from pipelinerl_actor.generator.transformers_engine import TransformersEngine
from pipelinerl_common.generator_api import InitGroupRequest
from pipelinerl_common.settings import GeneratorSettings
from pipelinerl_weights.group import Rendezvous, TransferGroup
from pipelinerl_weights.manifest import Manifest, TensorSpec
from pipelinerl_weights.snapshot import WeightSnapshot
from pipelinerl_weights.transfer import send_snapshot

BUCKET_BYTES = 1 << 20
TRANSFER_S = 120.0
SAMPLING_S = 1800.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """The tokens after which the behaviour's weights change: every num_tokens / max_lag, the first
    time after twice as many.

    Example: 64 tokens and a largest lag of 8 change after tokens 16, 24, 32, 40, 48 and 56.
    """

    num_tokens: int
    max_lag: int

    def __post_init__(self) -> None:
        if self.max_lag < 3 or self.num_tokens % self.max_lag:
            raise ValueError(
                f"num_tokens={self.num_tokens} must be a multiple of max_lag={self.max_lag}, and "
                "that at least 3: "
                "weights change after every num_tokens / max_lag tokens"
            )

    @property
    def interval(self) -> int:
        return self.num_tokens // self.max_lag

    @property
    def swaps(self) -> range:
        return range(2 * self.interval, self.num_tokens, self.interval)

    def end(self, lag: int) -> int:
        """Tokens of a sequence when its weights are `lag` steps newer than its first token's and
        about to change.
        """
        return min(self.num_tokens, (lag + 2) * self.interval)


@dataclass(frozen=True, slots=True)
class Samples:
    """Sampled tokens and their log-probabilities."""

    ids_NS: Tensor
    logprobs_NT: Tensor
    """Log-probabilities of the sampled tokens."""
    versions_NT: Tensor
    distributions_NTV: Tensor | None
    """Log-probabilities of all tokens, where the engine shows them."""

    def swaps(self) -> list[float]:
        """The number of tokens after which the weights changed, for each change, mean over
        sequences.
        """
        versions = range(int(self.versions_NT.min()), int(self.versions_NT.max()))
        return [float((self.versions_NT <= version).sum(1).double().mean()) for version in versions]


class Studied(ABC):
    """An engine and the checkpoints that can be loaded into it."""

    def __init__(self, engine: GeneratorEngine, policies: PolicySequence) -> None:
        self._engine = engine
        self._policies = policies
        self._manifest = _manifest(policies.weights[0])
        self._group: TransferGroup | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs the engine, in a group with this process as the sender."""
        async with self._engine.running():
            world_size = 1 + self._engine.num_workers
            rendezvous = Rendezvous.open("127.0.0.1", 0, world_size)
            request = InitGroupRequest(
                epoch=1,
                master_address="127.0.0.1",
                master_port=rendezvous.port,
                rank_offset=1,
                world_size=world_size,
                backend="gloo",
                timeout_s=TRANSFER_S,
            )
            joining = asyncio.create_task(self._engine.join(request))
            self._group = await asyncio.to_thread(
                TransferGroup.join,
                "127.0.0.1",
                rendezvous.port,
                rank=0,
                world_size=world_size,
                backend="gloo",
                epoch=1,
                timeout_s=TRANSFER_S,
                store=rendezvous,
            )
            await joining
            try:
                yield
            finally:
                self._group.close()

    async def sample(
        self,
        prompts_NP: Tensor,
        num_tokens: int,
        start: int,
        swaps: Sequence[int],
        kv_cache: KVCache,
    ) -> Samples:
        """Samples sequences that start under checkpoint `start`; after each number of tokens in
        `swaps` the next checkpoint continues them.
        """
        samplings = [
            Sampling(num_tokens, seed=seed, ignore_eos=True) for seed in range(len(prompts_NP))
        ]
        versions = dict(enumerate(swaps, start + 1))
        await self._serve(start)
        if versions:
            await self._stage(start + 1)
        async with asyncio.timeout(SAMPLING_S), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._engine.generate(prompt, sampling))
                for prompt, sampling in zip(prompts_NP.tolist(), samplings, strict=True)
            ]
            await self._begin(group, prompts_NP[0].tolist(), swaps)
            for version, num_sampled in versions.items():
                await self._reach(num_sampled)
                await self._apply(version, kv_cache)
                await self._go_on()
                if version + 1 in versions:
                    await self._stage(version + 1)
            await self._finish()
        return self._samples(prompts_NP, [task.result() for task in tasks])

    @abstractmethod
    async def compare_with(self, version: int) -> None:
        """Makes checkpoint `version` the target of `divergence`."""

    @abstractmethod
    async def divergence(self, samples: Samples) -> Tensor:
        """KL(behaviour || target) of every token, [N, T] in float64, exact or an estimate."""

    # How it is driven

    @abstractmethod
    async def _begin(
        self, group: asyncio.TaskGroup, prompt: list[int], swaps: Sequence[int]
    ) -> None:
        """Called when sequences have been submitted."""

    @abstractmethod
    async def _reach(self, num_sampled: int) -> None:
        """Waits until every sequence has that many tokens."""

    @abstractmethod
    async def _go_on(self) -> None:
        """Called after a swap."""

    @abstractmethod
    async def _finish(self) -> None:
        """Called after the last swap."""

    # Updates

    async def _serve(self, version: int) -> None:
        await self._stage(version)
        await self._apply(version, KVCache.RECOMPUTE)
        await self._go_on()

    async def _stage(self, version: int) -> None:
        assert self._group is not None
        snapshot = WeightSnapshot.pack(self._manifest, self._policies.weights[version].items())
        receiving = asyncio.create_task(
            self._engine.stage(Transfer(version, self._manifest, TRANSFER_S))
        )
        await asyncio.to_thread(send_snapshot, self._group, snapshot, version, TRANSFER_S)
        await receiving

    async def _apply(self, version: int, kv_cache: KVCache) -> None:
        await self._engine.pause(kv_cache)
        await self._engine.apply()
        await self._engine.set_version(version)

    def _samples(self, prompts_NP: Tensor, completions: list[EngineCompletion]) -> Samples:
        ids_NT = torch.tensor([completion.token_ids for completion in completions])
        runs = [completion.version_runs for completion in completions]
        versions = [
            [run.policy_version for run in each for _ in range(run.num_tokens)] for each in runs
        ]
        logprobs_NT = torch.tensor([completion.logprobs for completion in completions])
        return Samples(
            torch.cat([prompts_NP, ids_NT], 1), logprobs_NT, torch.tensor(versions), None
        )


class StudiedTransformers(Studied):
    """The exact engine: sequences stop at the chosen tokens, and it shows whole distributions."""

    def __init__(self, policies: PolicySequence, max_running: int) -> None:
        self._seen: dict[int | None, list[Tensor]] = {}
        settings = GeneratorSettings(engine="transformers", max_running_requests=max_running)
        options = EngineOptions(
            policies.folder,
            "float32",
            "model",
            policies.job.spec.model.max_model_len,
            settings,
            initial_version=0,
            can_stage=True,
            on_cpu=True,
        )
        self._transformers = TransformersEngine(options, self._see)
        self._target = sampling_model(policies.folder)
        self._num_sampled = 0
        super().__init__(self._transformers, policies)

    async def compare_with(self, version: int) -> None:
        self._target.load_state_dict(self._policies.weights[version])

    async def divergence(self, samples: Samples) -> Tensor:
        assert samples.distributions_NTV is not None
        return divergence.exact(
            samples.distributions_NTV, await asyncio.to_thread(self.target, samples.ids_NS)
        )

    @torch.inference_mode()
    def target(self, ids_NS: Tensor) -> Tensor:
        """Log-probabilities [N, T, V] under the target, with KV of its own."""
        logits_NTV: Tensor = self._target(input_ids=ids_NS, use_cache=False).logits[
            :, PERIOD - 1 : -1
        ]
        return logits_NTV.log_softmax(-1)

    def _see(self, sequence: Decoded, logprobs_V: Tensor) -> None:
        self._seen.setdefault(sequence.sampling.seed, []).append(logprobs_V)

    def _samples(self, prompts_NP: Tensor, completions: list[EngineCompletion]) -> Samples:
        plain = super()._samples(prompts_NP, completions)
        distributions_NTV = torch.stack(
            [torch.stack(self._seen[seed]) for seed in range(len(prompts_NP))]
        )
        return Samples(plain.ids_NS, plain.logprobs_NT, plain.versions_NT, distributions_NTV)

    async def _begin(
        self, group: asyncio.TaskGroup, prompt: list[int], swaps: Sequence[int]
    ) -> None:
        await asyncio.sleep(
            0
            # Every sequence is passed to the decoding thread, which is paused since the first
            # update.
        )
        self._seen, self._num_sampled = {}, 0

    async def _reach(self, num_sampled: int) -> None:
        await self._transformers.advance(num_sampled - self._num_sampled)
        self._num_sampled = num_sampled

    async def _go_on(self) -> None:
        """The engine stays paused until the next advance."""

    async def _finish(self) -> None:
        await self._engine.resume()


class StudiedVllm(Studied):
    """vLLM: it continues decoding while an update is prepared, so it stops some tokens late; its
    version runs show after which.

    It returns one log-probability for each sampled token, and computes the same one under the
    target.
    """

    def __init__(self, policies: PolicySequence, max_running: int) -> None:
        # All KV is recomputed in one step, so that no sequence decodes ahead of the others after an
        # update.
        arguments = {"max_num_batched_tokens": max_running * policies.job.spec.model.max_model_len}
        settings = GeneratorSettings.model_validate(
            {"engine": "vllm", "maxRunningRequests": max_running, "engineArgs": arguments}
        )
        engine = make_engine(
            policies.job,
            settings,
            policies.folder,
            initial_version=0,
            takes_updates=True,
            log_level="warning",
        )
        self._markers: dict[int, asyncio.Task[EngineCompletion]] = {}
        super().__init__(engine, policies)

    async def compare_with(self, version: int) -> None:
        await self._serve(version)

    async def divergence(self, samples: Samples) -> Tensor:
        async with asyncio.timeout(SAMPLING_S):
            scores = await asyncio.gather(
                *(self._engine.score(ids, PERIOD, 1.0) for ids in samples.ids_NS.tolist())
            )
        return divergence.k3(samples.logprobs_NT, torch.tensor(scores))

    async def _begin(
        self, group: asyncio.TaskGroup, prompt: list[int], swaps: Sequence[int]
    ) -> None:
        """Starts markers: sequences decoded in step with the others that end where the weights are
        to change.
        """
        self._markers = {
            num: group.create_task(
                self._engine.generate(prompt, Sampling(num, seed=0, ignore_eos=True))
            )
            for num in swaps
        }

    async def _reach(self, num_sampled: int) -> None:
        await self._markers[num_sampled]

    async def _go_on(self) -> None:
        await self._engine.resume()

    async def _finish(self) -> None:
        """The engine decodes; nothing is to be resumed."""


ENGINES = {"transformers": StudiedTransformers, "vllm": StudiedVllm}


def _manifest(weights: Weights) -> Manifest:
    specs = (
        TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape))
        for name, t in weights.items()
    )
    return Manifest(tuple(specs), BUCKET_BYTES)
