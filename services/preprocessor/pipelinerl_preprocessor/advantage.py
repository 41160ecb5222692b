"""Advantages of a group's trajectories from their rewards: a table of estimators.

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
class Estimator:
    """How rewards become advantages, the same for every sampled token of a trajectory."""

    advantages: Callable[[Floats], Floats]
    min_samples: int
    """A group with fewer trajectories has no baseline and is dropped."""
    with_returns: bool
    """Whether the reward is also the target of a value head, which then subtracts its own baseline."""


def leave_one_out(rewards_G: Floats) -> Floats:
    """A_i = r_i - mean of the others = G/(G-1) (r_i - mean): unbiased, since the baseline does not see r_i (RLOO)."""
    num_samples = len(rewards_G)
    centred_G: Floats = rewards_G - rewards_G.mean()
    return centred_G * (num_samples / (num_samples - 1))


def value(rewards_G: Floats) -> Floats:
    """A_i = r_i: the trainer subtracts its value head's prediction per token."""
    return rewards_G.copy()


def grpo(rewards_G: Floats) -> Floats:
    """A_i = (r_i - mean) / (std + eps), with the sample standard deviation (GRPO, arXiv 2402.03300, section 4.1.2)."""
    centred_G: Floats = rewards_G - rewards_G.mean()
    return centred_G / float(rewards_G.std(ddof=1) + STD_EPS)


ESTIMATORS: Mapping[str, Estimator] = {
    "leave_one_out": Estimator(leave_one_out, min_samples=2, with_returns=False),
    "value": Estimator(value, min_samples=1, with_returns=True),
    "grpo": Estimator(grpo, min_samples=2, with_returns=False),
}


def estimator_of(algorithm: AlgorithmSettings) -> Estimator:
    """The estimator that `loss` and `baseline` ask for."""
    return ESTIMATORS["grpo" if algorithm.loss == "grpo" else algorithm.baseline]
