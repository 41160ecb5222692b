"""One trajectory in the making: the Rollout that a task sees, and the exact record of its tokens."""

import asyncio
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from pipelinerl_actor.models.chat import Continuation
from pipelinerl_actor.rollout.failures import GivenUp, TrajectoryStopped
from pipelinerl_actor.rollout.generator_client import Completions, TurnRequest
from pipelinerl_actor.rollout.generators import Generators, TrajectoryClock
from pipelinerl_actor.rollout.partial import PartialAnswer, PartialAnswers
from pipelinerl_actor.rollout.verifier import Verifier
from pipelinerl_actor.task import Message, Prompt, Turn, Verdict
from pipelinerl_common.settings import SamplingSettings
from pipelinerl_common.tracing import span
from pipelinerl_common.types import Sample, VersionRun


class TokenRecord:
    """Given and sampled segments in alternation, exactly as the generator saw and sampled them."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.segment_lengths: list[int] = []
        self.turns: list[Turn] = []

    @property
    def num_sampled(self) -> int:
        return sum(len(turn.token_ids) for turn in self.turns)

    def add(self, prompt_token_ids: Sequence[int], turn: Turn) -> None:
        """`prompt_token_ids` is all that the generator saw before it sampled `turn`: the record so
        far and what is new.

        Raises GivenUp when it does not start with the record so far.
        """
        known = len(self.token_ids)
        if list(prompt_token_ids[:known]) != self.token_ids:
            raise GivenUp(
                "bad_response",
                f"the generator's prompt of {len(prompt_token_ids)} tokens is not what it was sent",
            )
        given = len(prompt_token_ids) - known
        self.token_ids = [*prompt_token_ids, *turn.token_ids]
        self.segment_lengths += [given, len(turn.token_ids)]
        self.turns.append(turn)

    def to_sample(self, index: int, verdict: Verdict) -> Sample:
        """Raises GivenUp when nothing was requested at all."""
        if not self.turns:
            raise GivenUp(
                "no_turns", "the task's rollout returned a verdict without sampling anything"
            )
        return Sample(
            index=index,
            token_ids_S=np.array(self.token_ids, dtype=np.uint32),
            segment_lengths=tuple(self.segment_lengths),
            logprobs_T=np.array(
                [logprob for turn in self.turns for logprob in turn.logprobs], dtype=np.float32
            ),
            version_runs=_merged([run for turn in self.turns for run in turn.version_runs]),
            reward=verdict.reward,
            finish_reason=self.turns[-1].finish_reason,
            metrics=dict(verdict.metrics),
        )


def _merged(runs: Sequence[VersionRun]) -> tuple[VersionRun, ...]:
    merged: list[VersionRun] = []
    for run in runs:
        if merged and merged[-1].policy_version == run.policy_version:
            merged[-1] = VersionRun(run.policy_version, merged[-1].num_tokens + run.num_tokens)
        else:
            merged.append(run)
    return tuple(merged)


class Sampler:
    """What every trajectory of the job shares: the generators, the sampling settings, the verifier,
    the chat template.
    """

    def __init__(
        self,
        generators: Generators,
        sampling: SamplingSettings,
        verifier: Verifier,
        continuation: Continuation,
        seed: int,
    ) -> None:
        self.generators = generators
        self.sampling = sampling
        self.verifier = verifier
        self.continuation = continuation
        self.seed = seed

    async def chat(
        self,
        messages: Sequence[Message],
        n: int,
        clock: TrajectoryClock,
        stop: asyncio.Event | None = None,
    ) -> Completions:
        return await self.generators.complete(
            TurnRequest(self.sampling, messages=messages, n=n, stop=stop), clock
        )

    async def go_on(
        self,
        prompt_token_ids: Sequence[int],
        answer: Turn,
        clock: TrajectoryClock,
        stop: asyncio.Event,
    ) -> Completions:
        """The rest of an answer of which the first tokens were sampled before."""
        request = TurnRequest(
            self.sampling,
            prompt_token_ids=prompt_token_ids,
            answer_token_ids=answer.token_ids,
            stop=stop,
        )
        return await self.generators.complete(request, clock)

    async def complete(
        self, prompt_token_ids: Sequence[int], clock: TrajectoryClock
    ) -> Completions:
        return await self.generators.complete(
            TurnRequest(self.sampling, prompt_token_ids=prompt_token_ids), clock
        )

    async def verify(self, prompt_index: int, prompt: Prompt, turn: Turn) -> Verdict:
        with self.generators.meter.verifying(), span("verify"):
            return await self.verifier.verify(prompt_index, prompt, turn)


class Keeping(Protocol):
    """Where a single-turn trajectory leaves what it samples, and what stops it."""

    stop: asyncio.Event
    answers: PartialAnswers


class Trajectory:
    """Implements `pipelinerl_actor.task.Rollout`."""

    def __init__(
        self,
        sampler: Sampler,
        prompt_index: int,
        sample_index: int,
        prompt: Prompt,
        clock: TrajectoryClock,
        keeping: "Keeping | None" = None,
    ) -> None:
        self.record = TokenRecord()
        self._keeping = keeping
        self._sampler = sampler
        self._prompt_index = prompt_index
        self._sample_index = sample_index
        self._prompt = prompt
        self._clock = clock

    @property
    def prompt_index(self) -> int:
        return self._prompt_index

    @property
    def sample_index(self) -> int:
        return self._sample_index

    @property
    def seed(self) -> int:
        return self._sampler.seed

    @property
    def prompt(self) -> Prompt:
        return self._prompt

    @property
    def turns(self) -> Sequence[Turn]:
        return tuple(self.record.turns)

    async def chat(self, messages: Sequence[Message]) -> Turn:
        if not self.record.turns:
            stop = self._keeping.stop if self._keeping is not None else None
            return self._add(await self._sampler.chat(messages, 1, self._clock, stop))
        given = await self._sampler.continuation.token_ids(
            self.record.turns[-1].token_ids, messages
        )
        return await self.complete(given)

    async def complete(self, token_ids: Sequence[int]) -> Turn:
        return self._add(
            await self._sampler.complete([*self.record.token_ids, *token_ids], self._clock)
        )

    async def verify(self, turn: Turn) -> Verdict:
        return await self._sampler.verify(self._prompt_index, self._prompt, turn)

    def _add(self, completions: Completions) -> Turn:
        turn, is_complete = completions.turns[0], completions.complete[0]
        if self._keeping is not None:
            self._keeping.answers.keep(
                self._sample_index, completions.prompt_token_ids, PartialAnswer(turn, is_complete)
            )
        self.record.add(completions.prompt_token_ids, turn)
        if not is_complete:
            raise TrajectoryStopped
        return turn


def check_verdict(verdict: object) -> Verdict:
    """The verdict with plain finite floats. Raises GivenUp: "bad_verdict" or "non_finite_reward"."""
    if not isinstance(verdict, Verdict):
        raise GivenUp("bad_verdict", f"expected a Verdict, got {type(verdict).__name__}")
    try:
        reward = float(verdict.reward)
        metrics = {str(name): float(value) for name, value in verdict.metrics.items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise GivenUp("bad_verdict", f"{verdict}: {error}") from error
    if not math.isfinite(reward):
        raise GivenUp("non_finite_reward", f"reward={reward}")
    broken = [name for name, value in metrics.items() if not math.isfinite(value)]
    if broken:
        raise GivenUp("non_finite_metric", f"metric {broken[0]}={metrics[broken[0]]}")
    return Verdict(reward, metrics)
