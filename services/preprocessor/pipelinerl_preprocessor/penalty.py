"""Penalties in the reward, for length and for divergence from the reference, and what a value head
learns from them.

Shape suffix: T sampled tokens of one trajectory.
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from pipelinerl_common.settings import OverlongSettings
from pipelinerl_common.types import Sample

Floats = NDArray[np.float64]

MAX_LOG_RATIO = 20.0
"""Log-ratios are limited to this, so that one token that the reference hardly knows does not make a
reward of its own.
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
    """R_t = r_t + discount R_{t+1}: the target of a value head where token t is chosen. The reward
    comes with the last token, the penalty -r_t with each.

    Example: reward 1, penalties 0, 0.5, 0, discount 1: 0.5, 0.5, 1.
    """
    returns_T = np.empty(len(penalties_T))
    following = 0.0
    for t in reversed(range(len(penalties_T))):
        reward_t = (reward if t == len(penalties_T) - 1 else 0.0) - penalties_T[t]
        following = reward_t + discount * following
        returns_T[t] = following
    return returns_T
