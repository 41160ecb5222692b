"""Synthetic trajectories with the sizes of real ones: heavy-tailed lengths, a prompt and a
completion, a few version runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipelinerl_common.types import FinishReason, GroupId, Sample, SampleGroup, VersionRun

VOCABULARY = 151_936
"""The size of Qwen's vocabulary; frequent tokens have low ids, as in text."""
COMPLETION_SIGMA = 0.8
PROMPT_MEDIAN, PROMPT_SIGMA, PROMPT_MAX = 150, 0.5, 1024


@dataclass(frozen=True)
class Workload:
    """The trajectories of a bench: `num_groups` groups from a pool of `num_distinct`, so that
    memory stays small however long the run is.
    """

    num_groups: int
    num_distinct: int
    group_size: int
    median_tokens: int
    max_tokens: int
    seed: int

    @property
    def num_samples(self) -> int:
        return self.num_groups * self.group_size

    def groups(self) -> list[SampleGroup]:
        """The pool: `num_distinct` groups, the same in every process for the same seed."""
        random = np.random.default_rng(self.seed)
        return [
            self._group(random, number) for number in range(min(self.num_distinct, self.num_groups))
        ]

    def _group(self, random: np.random.Generator, number: int) -> SampleGroup:
        num_prompt = int(lengths(random, 1, PROMPT_MEDIAN, PROMPT_SIGMA, PROMPT_MAX)[0])
        prompt_P = _token_ids(random, num_prompt)
        completions = lengths(
            random, self.group_size, self.median_tokens, COMPLETION_SIGMA, self.max_tokens
        )
        samples = [
            _sample(random, index, prompt_P, int(length), self.max_tokens)
            for index, length in enumerate(completions)
        ]
        return SampleGroup(
            job="bench",
            group_id=GroupId(f"0-{number}"),
            attempt=1,
            prompt_index=number,
            temperature=1.0,
            samples=tuple(samples),
            finished_at=0.0,
        )


def cycle(pool: list[SampleGroup], num_groups: int) -> Iterator[SampleGroup]:
    """Yields `num_groups` groups of the pool in turn, each with an id of its own."""
    for number in range(num_groups):
        yield replace(
            pool[number % len(pool)], group_id=GroupId(f"0-{number}"), prompt_index=number
        )


def lengths(
    random: np.random.Generator, count: int, median: int, sigma: float, longest: int
) -> NDArray[np.int64]:
    """Log-normal lengths in tokens, at least 1 and capped as a token budget caps them."""
    drawn = np.exp(random.normal(np.log(median), sigma, count))
    return np.clip(drawn.astype(np.int64), 1, longest)


def _sample(
    random: np.random.Generator,
    index: int,
    prompt_P: NDArray[np.uint32],
    num_sampled: int,
    longest: int,
) -> Sample:
    first = num_sampled // 3
    runs = (
        (VersionRun(6, first), VersionRun(7, num_sampled - first))
        if first
        else (VersionRun(7, num_sampled),)
    )
    return Sample(
        index=index,
        token_ids_S=np.concatenate([prompt_P, _token_ids(random, num_sampled)]),
        segment_lengths=(len(prompt_P), num_sampled),
        logprobs_T=-random.exponential(0.5, num_sampled).astype(np.float32),
        version_runs=runs,
        reward=float(random.integers(0, 2)),
        finish_reason=FinishReason.LENGTH if num_sampled == longest else FinishReason.STOP,
        metrics={"success": 1.0},
    )


def _token_ids(random: np.random.Generator, count: int) -> NDArray[np.uint32]:
    """Tokens log-uniform over the vocabulary: half of them are among its 400 most frequent."""
    return (np.exp(random.uniform(0.0, np.log(VOCABULARY), count)) - 1).astype(np.uint32)
