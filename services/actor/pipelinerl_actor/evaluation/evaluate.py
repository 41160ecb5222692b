"""Rolls a task out on generators that serve one version of the weights, and estimates pass@k and
the mean reward, with confidence intervals.

prompts 0 .. P-1 --n answers each--> GroupRoller --HTTP--> generators
                                         | verifier
                                         v
                 outcomes per prompt --> pass@k, reward, with intervals

Prompts are the independent draws: answers to one prompt are not, so intervals resample prompts,
never single answers.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelinerl.v1.admission_pb2 import GroupLease
from pipelinerl_actor.rollout.failures import GroupFailed
from pipelinerl_actor.rollout.group import GroupRoller
from pipelinerl_actor.task import Task, TaskName
from pipelinerl_actor.task_loader import load_task
from pipelinerl_common.errors import FatalError, SettingsError
from pipelinerl_common.settings import EvaluationSetSettings, Job, JobSpec, TaskSettings
from pipelinerl_common.types import FinishReason, SampleGroup

CONFIDENCE = 0.95
_NUM_RESAMPLES = 10_000
_CHUNK = 500


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts and its 95 % confidence interval. Example: Estimate(0.62, 0.55, 0.69)."""

    mean: float
    low: float
    high: float


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that at least one of `k` answers drawn without replacement from `num_samples` is among
    the `num_correct`.

    1 - C(n - c, k) / C(n, k): the unbiased estimate of Chen et al. 2021, "Evaluating large language
    models trained on code", equation 1.
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(
            f"pass@{k} of {num_correct} correct among {num_samples}: needs 1 <= k <= samples and "
            "correct <= samples"
        )
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def estimate(values_P: Sequence[float], seed: int) -> Estimate:
    """The mean of per-prompt values in [low, high], by the percentile bootstrap over prompts.

    Where all values are equal the bootstrap says nothing; for values in [0, 1] the interval then is
    Wilson's, as if each prompt were one trial, and for others it has no width.
    """
    values = np.asarray(values_P, dtype=np.float64)
    if values.size == 0:
        raise ValueError("an estimate needs at least one prompt")
    mean = float(values.mean())
    if values.min() == values.max():
        low, high = _wilson(mean, values.size) if 0 <= mean <= 1 else (mean, mean)
        return Estimate(mean, low, high)
    means = _resampled_means(values, np.random.default_rng(seed))
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(mean, float(low), float(high))


def _resampled_means(
    values: NDArray[np.float64], generator: np.random.Generator
) -> NDArray[np.float64]:
    # In chunks, so that memory is bounded by `_CHUNK` x prompts.
    chunks = []
    for start in range(0, _NUM_RESAMPLES, _CHUNK):
        size = (min(_CHUNK, _NUM_RESAMPLES - start), values.size)
        chunks.append(values[generator.integers(0, values.size, size)].mean(axis=1))
    return np.concatenate(chunks)


def _wilson(share: float, num_trials: int) -> tuple[float, float]:
    """The interval of Wilson 1927, with z of the confidence above."""
    z = 1.959963984540054
    centre = share + z * z / (2 * num_trials)
    half = z * math.sqrt(share * (1 - share) / num_trials + z * z / (4 * num_trials * num_trials))
    scale = 1 + z * z / num_trials
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def task_of(spec: JobSpec, each: EvaluationSetSettings) -> TaskSettings:
    """The task settings of a set; what the set leaves open is as in training."""
    own = {
        "path": each.path,
        "args": each.args,
        "group_size": each.samples_per_prompt,
        "min_group_fraction": 1.0,
    }
    return spec.task.model_copy(update={**own, "sampling": each.sampling or spec.task.sampling})


def seed_of(spec: JobSpec) -> int:
    """The seed of the sets' prompts. It differs from the training's, so that a task that draws its
    prompts is evaluated on others, as in `pipelinerl eval`.
    """
    return spec.seed + 1


def make_sets(job: Job) -> dict[str, Task]:
    """The task of every set by its name, for all evaluations. Raises SettingsError that names the
    set.
    """
    made: dict[str, Task] = {}
    for each in job.spec.evaluation.sets if job.spec.evaluation is not None else ():
        try:
            made[each.name] = load_task(TaskName(each.path, each.args, seed_of(job.spec)))
        except SettingsError as error:
            raise SettingsError(f"evaluation set {each.name!r}: {error}") from error
    return made


SUCCESS = "success"
"""The verdict's metric that decides whether an answer passes; without it, a reward of at least 1.
"""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result for one task. Failed prompts are counted by reason and are in no estimate."""

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
        """Raises FatalError when no prompt could be evaluated, or when the weights changed."""
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
        answers = [sample for group in groups for sample in group.samples]
        versions = {run.policy_version for sample in answers for run in sample.version_runs}
        if len(versions) > 1:
            raise FatalError(
                f"the answers come from several versions of the weights: {sorted(versions)}"
            )
        return _evaluation(groups, versions.pop(), k, seed, dict(failures))

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
                group = await self._roller.roll_out(self._roller.begin(lease))
            except GroupFailed as error:
                failures[error.reason] += 1
                return None
            finally:
                self._on_prompt()
        if len(group.samples) < self._num_samples:
            failures["incomplete"] += 1
            return None
        return group


def _evaluation(
    groups: Sequence[SampleGroup],
    version: int,
    k: Sequence[int],
    seed: int,
    failures: dict[str, int],
) -> Evaluation:
    """The estimates over the groups, one for each prompt, of equally many answers."""
    n = len(groups[0].samples)
    answers = [sample for group in groups for sample in group.samples]
    passed_P = [
        sum(sample.metrics.get(SUCCESS, sample.reward) >= 1.0 for sample in group.samples)
        for group in groups
    ]
    rewards_P = [sum(sample.reward for sample in group.samples) / n for group in groups]
    truncated = sum(sample.finish_reason is FinishReason.LENGTH for sample in answers)
    return Evaluation(
        policy_version=version,
        num_prompts=len(groups),
        num_samples=n,
        pass_at={
            each: estimate([pass_at_k(n, passed, each) for passed in passed_P], seed) for each in k
        },
        reward=estimate(rewards_P, seed),
        tokens_per_answer=sum(sample.num_sampled for sample in answers) / len(answers),
        truncated_share=truncated / len(answers),
        failures=failures,
    )
