"""From the rewards of a group to advantages: penalties in the reward, for length and for divergence
from the reference; a baseline that is subtracted; a scale; and the targets of a value head.

A new baseline is one function and one line in `BASELINES`. Shape suffixes: G trajectories of one
group, T sampled tokens of one trajectory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelinerl_common.settings import AlgorithmSettings, OverlongSettings
from pipelinerl_common.types import Sample

Floats = NDArray[np.float64]

STD_EPS = 1e-6
"""Added to a group's standard deviation, so that equal rewards give zero advantages."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """A rule for what is subtracted from the rewards, the same for every sampled token of a
    trajectory.
    """

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
    """The advantage of every trajectory of a group by the job's `baseline` and `divideByStd`."""
    centred_G = BASELINES[algorithm.baseline].advantages(rewards_G)
    return centred_G / (deviation(rewards_G) + STD_EPS) if algorithm.divide_by_std else centred_G


MAX_LOG_RATIO = 20.0
"""Log-ratios are limited to this, so that one token that is very unlikely under the reference does
not dominate the reward.
"""

KL_ESTIMATORS: Mapping[str, Callable[[Floats], Floats]] = {
    # r = log ref - log mu of a sampled token. Source: Schulman, "Approximating KL divergence"
    # (2020).
    "k1": lambda log_ratios_T: -log_ratios_T,
    "k2": lambda log_ratios_T: 0.5 * log_ratios_T**2,
    "k3": lambda log_ratios_T: np.exp(log_ratios_T) - log_ratios_T - 1.0,
}


def overlong_penalty(sample: Sample, overlong: OverlongSettings, max_tokens: int) -> float:
    """DAPO's soft over-long punishment (arXiv 2503.14476, equation 13): 0 up to `max_tokens -
    buffer` tokens, then linear down to -1 at `max_tokens`. `max_tokens` limits one request, so the
    longest sampled segment counts.

    Example: buffer 4, max_tokens 10: 6 tokens 0.0, 7 tokens -0.25, 10 tokens -1.0.
    """
    buffer = overlong.penalty_buffer_tokens
    if buffer == 0:
        return 0.0
    excess = max(sample.segment_lengths[1::2], default=0) - (max_tokens - buffer)
    return -min(max(excess / buffer, 0.0), 1.0)


def kl_per_token(
    logprobs_T: NDArray[np.float32], ref_logprobs_T: NDArray[np.float32], estimator: str
) -> Floats:
    """An estimate of KL(mu || ref) at each sampled token, mu being the policy that sampled it.

    Source: the per-token penalty of PPO for language models (arXiv 1909.08593), equation 2, there
    k1.
    """
    log_ratios_T = ref_logprobs_T.astype(np.float64) - logprobs_T.astype(np.float64)
    return KL_ESTIMATORS[estimator](log_ratios_T.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def returns(reward: float, penalties_T: Floats, discount: float) -> Floats:
    """R_t = r_t + discount R_{t+1}: the target of a value head where token t is chosen. The last
    token earns the reward, every token pays its penalty.

    Example: reward 1, penalties 0, 0.5, 0, discount 1: 0.5, 0.5, 1.
    """
    returns_T = np.empty(len(penalties_T))
    following = 0.0
    for t in reversed(range(len(penalties_T))):
        reward_t = (reward if t == len(penalties_T) - 1 else 0.0) - penalties_T[t]
        following = reward_t + discount * following
        returns_T[t] = following
    return returns_T
