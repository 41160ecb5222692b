"""Advantages of a group's trajectories from their rewards: a baseline that is subtracted, and a
scale. A new baseline is one function and one line in `BASELINES`.

Shape suffix: G trajectories of one group.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelinerl_common.settings import AlgorithmSettings

Floats = NDArray[np.float64]

STD_EPS = 1e-6
"""Added to a group's standard deviation, so that equal rewards give zero advantages."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """What is subtracted from rewards, the same for every sampled token of a trajectory."""

    advantages: Callable[[Floats], Floats]
    min_samples: int
    """A group with fewer trajectories has no baseline and is dropped."""


def leave_one_out(rewards_G: Floats) -> Floats:
    """A_i = r_i - mean of the others = G/(G-1) (r_i - mean): unbiased, since the baseline does not
    see r_i.

    Source: RLOO (arXiv 2402.14740), section 3.
    """
    num_samples = len(rewards_G)
    return mean(rewards_G) * (num_samples / (num_samples - 1))


def mean(rewards_G: Floats) -> Floats:
    """A_i = r_i - mean of the group: leave-one-out shrunk by (G-1)/G. Source: Dr. GRPO (arXiv
    2503.20783), section 3.2.
    """
    centred_G: Floats = rewards_G - rewards_G.mean()
    return centred_G


def none(rewards_G: Floats) -> Floats:
    """A_i = r_i: plain REINFORCE; also where the trainer subtracts its value head's prediction per
    token.
    """
    return rewards_G.copy()


BASELINES: Mapping[str, Baseline] = {
    "leave_one_out": Baseline(leave_one_out, min_samples=2),
    "mean": Baseline(mean, min_samples=2),
    "none": Baseline(none, min_samples=1),
    "value": Baseline(none, min_samples=1),
}


def deviation(rewards_G: Floats) -> float:
    """The sample standard deviation of the group's rewards. Source: GRPO (arXiv 2402.03300),
    section 4.1.2.
    """
    return float(rewards_G.std(ddof=1))


def advantages(rewards_G: Floats, algorithm: AlgorithmSettings) -> Floats:
    """Of every trajectory of a group, as the job's `baseline` and `divideByStd` say."""
    centred_G = BASELINES[algorithm.baseline].advantages(rewards_G)
    return centred_G / (deviation(rewards_G) + STD_EPS) if algorithm.divide_by_std else centred_G
