"""pass@k and mean reward of a sample of prompts, with confidence intervals.

Prompts are the independent draws: answers to one prompt are not, so intervals resample prompts,
never single answers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
_NUM_RESAMPLES = 10_000
_CHUNK = 500


@dataclass(frozen=True, slots=True)
class Estimate:
    """Example: Estimate(0.62, 0.55, 0.69): the mean over prompts, and its 95 % confidence interval."""

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
    """In chunks, so that memory is bounded by `_CHUNK` x prompts."""
    chunks = []
    for start in range(0, _NUM_RESAMPLES, _CHUNK):
        size = (min(_CHUNK, _NUM_RESAMPLES - start), values.size)
        chunks.append(values[generator.integers(0, values.size, size)].mean(axis=1))
    return np.concatenate(chunks)


def _wilson(share: float, num_trials: int) -> tuple[float, float]:
    """Wilson 1927, with z of the confidence above."""
    z = 1.959963984540054
    centre = share + z * z / (2 * num_trials)
    half = z * math.sqrt(share * (1 - share) / num_trials + z * z / (4 * num_trials * num_trials))
    scale = 1 + z * z / num_trials
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)
