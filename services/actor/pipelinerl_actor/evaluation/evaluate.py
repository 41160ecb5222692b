"""Rolls a task out on generators that serve one version of the weights, and judges the answers.

prompts 0 .. P-1 --n answers each--> GroupRoller --HTTP--> generators
                                         | verifier
                                         v
                 outcomes per prompt --> pass@k, reward, with intervals
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipelinerl.v1.admission_pb2 import GroupLease
from pipelinerl_actor.evaluation.estimates import Estimate, estimate, pass_at_k
from pipelinerl_actor.rollout.group import GroupFailed, GroupRoller, Progress
from pipelinerl_common.errors import FatalError
from pipelinerl_common.types import FinishReason, Sample, SampleGroup

SUCCESS = "success"
"""The verdict's metric that decides whether an answer passes; without it, a reward of at least 1
does.
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one prompt. Example: Outcome(17, (1.0, 0.0), 1, 38): two answers, one passed, 38 sampled
    tokens.
    """

    prompt_index: int
    rewards: tuple[float, ...]
    num_passed: int
    num_tokens: int
    num_truncated: int = 0
    """Answers that ran into the token limit."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What is reported. Failed prompts are counted by reason and are in no estimate."""

    policy_version: int
    num_prompts: int
    num_samples: int
    """Answers per prompt."""
    pass_at: dict[int, Estimate]
    """By k."""
    reward: Estimate
    tokens_per_answer: float
    truncated_share: float
    failures: dict[str, int]


class Evaluator:
    """Evaluates one task. The generators must serve one version for as long as it takes."""

    def __init__(
        self,
        roller: GroupRoller,
        *,
        num_samples: int,
        at_once: int,
        on_prompt: Callable[[], None] = lambda: None,
    ) -> None:
        """`at_once`: prompts that are rolled out side by side; `on_prompt` is called after each."""
        self._roller = roller
        self._num_samples = num_samples
        self._room = asyncio.Semaphore(at_once)
        self._on_prompt = on_prompt

    async def run(self, prompts: Sequence[int], k: Sequence[int], seed: int) -> Evaluation:
        """Raises FatalError when no prompt could be evaluated, or when the weights keep changing."""
        failures: Counter[str] = Counter()
        groups = [
            group
            for group in await asyncio.gather(
                *(self._roll_out(index, failures) for index in prompts)
            )
            if group
        ]
        if not groups:
            raise FatalError(
                f"none of the {len(prompts)} prompts could be evaluated: {dict(failures)}"
            )
        versions = {version for group in groups for version in _versions(group)}
        if len(versions) > 1:
            raise FatalError(
                f"the answers come from several versions of the weights: {sorted(versions)}"
            )
        outcomes = [outcome_of(group) for group in groups]
        return _evaluation(outcomes, versions.pop(), k, seed, dict(failures))

    async def _roll_out(self, index: int, failures: Counter[str]) -> SampleGroup | None:
        """None for a prompt that failed, which is counted."""
        lease = GroupLease(
            lease_id=f"eval-{index}",
            group_id=f"eval-{index}",
            prompt_index=index,
            group_size=self._num_samples,
        )
        async with self._room:
            try:
                group = await self._roller.roll_out(
                    lease, Progress(num_unsampled=self._num_samples)
                )
            except GroupFailed as error:
                failures[error.reason] += 1
                return None
            finally:
                self._on_prompt()
        if len(group.samples) < self._num_samples:
            failures["incomplete"] += 1
            return None
        return group


def outcome_of(group: SampleGroup) -> Outcome:
    return Outcome(
        prompt_index=group.prompt_index,
        rewards=tuple(sample.reward for sample in group.samples),
        num_passed=sum(_passed(sample) for sample in group.samples),
        num_tokens=sum(sample.num_sampled for sample in group.samples),
        num_truncated=sum(sample.finish_reason is FinishReason.LENGTH for sample in group.samples),
    )


def _passed(sample: Sample) -> bool:
    return sample.metrics.get(SUCCESS, sample.reward) >= 1.0


def _versions(group: SampleGroup) -> set[int]:
    return {run.policy_version for sample in group.samples for run in sample.version_runs}


def _evaluation(
    outcomes: Sequence[Outcome], version: int, k: Sequence[int], seed: int, failures: dict[str, int]
) -> Evaluation:
    n = len(outcomes[0].rewards)
    num_answers = n * len(outcomes)
    return Evaluation(
        policy_version=version,
        num_prompts=len(outcomes),
        num_samples=n,
        pass_at={
            each: estimate([pass_at_k(n, outcome.num_passed, each) for outcome in outcomes], seed)
            for each in k
        },
        reward=estimate([sum(outcome.rewards) / n for outcome in outcomes], seed),
        tokens_per_answer=sum(outcome.num_tokens for outcome in outcomes) / num_answers,
        truncated_share=sum(outcome.num_truncated for outcome in outcomes) / num_answers,
        failures=failures,
    )
