"""KL(behaviour || target) of every sampled token, and means over sequences with their confidence
bands.

Shape suffixes: N sequences, T sampled tokens, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

_Z = 1.96
"""Standard errors on either side of the mean: 95 % for many sequences."""


def exact(behaviour_NTV: Tensor, target_NTV: Tensor) -> Tensor:
    """The exact divergence [N, T] in float64, from all log-probabilities of both:
    sum_v mu_v (log mu_v - log pi_v); only contexts are sampled.

    Both are normalised again in float64, so that the rounding of float32 matters to second order
    only.
    """
    behaviour, target = behaviour_NTV.double().log_softmax(-1), target_NTV.double().log_softmax(-1)
    return (behaviour.exp() * (behaviour - target)).sum(-1)


def k3(behaviour_NT: Tensor, target_NT: Tensor) -> Tensor:
    """An estimate [N, T] in float64, from log-probabilities of the sampled tokens alone:
    r - 1 - log r with r = pi / mu.

    Unbiased under sampling from mu, never negative, and of less variance than the log-ratio, since
    r - 1 has mean 0 and varies against it. Source: J. Schulman, Approximating KL Divergence (2020).
    """
    log_ratios = target_NT.double() - behaviour_NT.double()
    return log_ratios.exp() - 1 - log_ratios


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over sequences, nats per token, and its 95 % band."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, divergence_NT: Tensor) -> "Estimate":
        """The mean over sequences. Sequences are independent, tokens of one are not: the spread is
        that of the sequences' own means.
        """
        means_N = divergence_NT.mean(1)
        mean = float(means_N.mean())
        margin = _Z * float(means_N.std()) / math.sqrt(len(means_N))
        return cls(mean, mean - margin, mean + margin)


def equivalent_lag(by_lag: Sequence[float], value: float) -> float | None:
    """The lag at which a curve over lags 0, 1, 2, ... first reaches `value`, linear between its
    points; None if never.
    """
    for lag, (low, high) in enumerate(pairwise(by_lag)):
        if low <= value <= high:
            return lag + (value - low) / (high - low) if high > low else float(lag)
    return None
