"""One trajectory under way: the Rollout that a task sees, and the exact record of its tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipelinerl_actor.models.chat import Continuation
from pipelinerl_actor.rollout.failures import GivenUp, RolloutStopped
from pipelinerl_actor.rollout.generator_client import Completions, TurnRequest
from pipelinerl_actor.rollout.generators import Generators, TrajectoryClock
from pipelinerl_actor.rollout.progress import PartialGroup, Progress
from pipelinerl_actor.rollout.verifier import Verifier
from pipelinerl_actor.task import Message, Prompt, Turn, Verdict
from pipelinerl_common.settings import SamplingSettings
from pipelinerl_common.tracing import span
from pipelinerl_common.types import Sample, merge_runs


class TokenRecord:
    """Given and sampled segments in alternation, exactly as the generator saw and sampled them."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.segment_lengths: list[int] = []
        self.turns: list[Turn] = []

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
        logprobs = [logprob for turn in self.turns for logprob in turn.logprobs]
        return Sample(
            index=index,
            token_ids_S=np.array(self.token_ids, dtype=np.uint32),
            segment_lengths=tuple(self.segment_lengths),
            logprobs_T=np.array(logprobs, dtype=np.float32),
            version_runs=merge_runs(run for turn in self.turns for run in turn.version_runs),
            reward=verdict.reward,
            finish_reason=self.turns[-1].finish_reason,
            metrics=dict(verdict.metrics),
        )


@dataclass(frozen=True, slots=True)
class Sampler:
    """What all trajectories of a job share: generators, settings, verifier, chat template."""

    generators: Generators
    sampling: SamplingSettings
    verifier: Verifier
    continuation: Continuation
    seed: int

    async def sample(
        self, request: TurnRequest, clock: TrajectoryClock, progress: Progress
    ) -> Completions:
        """Raises what Generators.complete raises."""
        completions = await self.generators.complete(request, clock)
        progress.num_tokens += sum(len(turn.token_ids) for turn in completions.turns)
        return completions


class Trajectory:
    """Implements `pipelinerl_actor.task.Rollout`."""

    def __init__(
        self,
        sampler: Sampler,
        progress: Progress,
        prompt: Prompt,
        sample_index: int,
        clock: TrajectoryClock,
    ) -> None:
        """`progress` is the group's. What its partial answers have is not sampled again."""
        self.record = TokenRecord()
        self.prompt_index = progress.lease.prompt_index
        self.sample_index = sample_index
        self.prompt = prompt
        self.seed = sampler.seed
        self._sampler = sampler
        self._clock = clock
        self._progress = progress

    @property
    def turns(self) -> Sequence[Turn]:
        return tuple(self.record.turns)

    async def chat(self, messages: Sequence[Message]) -> Turn:
        if self.record.turns:
            sampled = self.record.turns[-1].token_ids
            return await self.complete(
                await self._sampler.continuation.token_ids(sampled, messages)
            )
        if (partial := self._progress.partial) is not None:
            return await self._answer(messages, partial)
        return await self._request(TurnRequest(self._sampler.sampling, messages=messages))

    async def complete(self, token_ids: Sequence[int]) -> Turn:
        given = [*self.record.token_ids, *token_ids]
        return await self._request(TurnRequest(self._sampler.sampling, prompt_token_ids=given))

    async def verify(self, turn: Turn) -> Verdict:
        with self._sampler.generators.meter.verifying(), span("verify"):
            return await self._sampler.verifier.verify(self.prompt_index, self.prompt, turn)

    async def _request(self, request: TurnRequest) -> Turn:
        completions = await self._sampler.sample(request, self._clock, self._progress)
        self.record.add(completions.prompt_token_ids, completions.turns[0])
        return completions.turns[0]

    async def _answer(self, messages: Sequence[Message], partial: PartialGroup) -> Turn:
        """The only turn of a single-turn task: samples what is missing of it in `partial`."""
        answer, sampling = partial.answers.get(self.sample_index), self._sampler.sampling
        if answer is None or not answer.is_complete:
            if answer is None:
                request = TurnRequest(sampling, messages=messages, stop=partial.stop)
            else:
                request = TurnRequest(
                    sampling,
                    prompt_token_ids=partial.prompt_token_ids,
                    answer_token_ids=answer.turn.token_ids,
                    stop=partial.stop,
                )
            completions = await self._sampler.sample(request, self._clock, self._progress)
            turn, is_complete = completions.turns[0], completions.complete[0]
            partial.add(self.sample_index, completions.prompt_token_ids, turn, is_complete)
            answer = partial.answers[self.sample_index]
        if not answer.is_complete:
            raise RolloutStopped
        self.record.add(partial.prompt_token_ids, answer.turn)
        return answer.turn


def check_verdict(verdict: object) -> Verdict:
    """The verdict with plain finite floats. Raises GivenUp for any other value."""
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
