"""An engine without a model, which records its calls and fails where a test wants it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pipelinerl_actor.generator.engine import (
    EngineCompletion,
    KVCache,
    Received,
    Sampling,
    Transfer,
)
from pipelinerl_actor.generator.metrics import StepClock
from pipelinerl_common.generator_api import InitGroupRequest, LoadResponse
from pipelinerl_common.types import VersionRun


@dataclass
class FakeEngine:
    """`failing` maps a verb to the error that it raises. Sequences end when `gate` is set."""

    num_workers: int = 1
    can_stage: bool = True
    failing: dict[str, Exception] = field(default_factory=dict)
    verbs: list[str] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    num_decoding: int = 0

    def _do(self, verb: str) -> None:
        self.verbs.append(verb)
        if verb in self.failing:
            raise self.failing[verb]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    def load(self) -> LoadResponse:
        return StepClock().load().model_copy(update={"num_running": self.num_decoding})

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, stop: asyncio.Event | None = None
    ) -> EngineCompletion:
        self._do("generate")
        self.num_decoding += 1
        try:
            await self.gate.wait()
        finally:
            self.num_decoding -= 1
        return EngineCompletion("x", (5,), (-0.5,), (VersionRun(0, 1),), "length")

    async def score(self, token_ids: Sequence[int], start: int, temperature: float) -> list[float]:
        self._do("score")
        return [-1.0] * (len(token_ids) - start)

    async def join(self, group: InitGroupRequest) -> list[int]:
        self._do("join")
        return [group.rank_offset]

    async def leave(self) -> None:
        self._do("leave")

    async def stage(self, transfer: Transfer) -> Received:
        self._do("stage")
        return Received("00ff", 1.0, 0.25)

    async def back_up(self) -> None:
        self._do("back_up")

    async def pause(self, kv_cache: KVCache) -> None:
        self._do(f"pause {kv_cache}")

    async def apply(self) -> None:
        self._do("apply")

    async def receive_in_place(self, transfer: Transfer) -> Received:
        self._do("receive_in_place")
        return Received("00ff", 1.0, 0.25)

    async def roll_back(self) -> None:
        self._do("roll_back")

    async def set_version(self, version: int) -> None:
        self._do(f"version {version}")

    async def resume(self) -> None:
        self._do("resume")
