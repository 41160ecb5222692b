"""Importance weights w = pi / mu of trained tokens: of each token alone, or of its whole sequence.

mu is the distribution that the token was sampled from, pi the current policy. Shape
suffixes: T trained tokens of a packed row, N sequences of it. A sequence is never split over rows,
so a row knows all trained tokens of its sequences.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are limited to this before exp, so that one token sampled by a very different policy
gives 5e8 and not inf.
"""

ImportanceFunction = Callable[[Tensor, Tensor], Tensor]
"""(log_ratios_T, sequence_T) -> weights_T, without gradient; sequence_T is the number of the
token's sequence in its row.
"""


def _exp(log_ratios: Tensor) -> Tensor:
    return torch.exp(log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def sums_per_sequence(values_T: Tensor, sequence_T: Tensor) -> Tensor:
    """Returns for each token the sum over its sequence's tokens. Example: values 1 2 3 of sequences
    0 0 1 give 3 3 3.
    """
    if not len(sequence_T):
        return values_T
    sums_N = values_T.new_zeros(int(sequence_T.max()) + 1).index_add(0, sequence_T, values_T)
    return sums_N[sequence_T]


def lengths_per_sequence(sequence_T: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns for each token the number of trained tokens of its sequence."""
    return sums_per_sequence(
        torch.ones(len(sequence_T), dtype=dtype, device=sequence_T.device), sequence_T
    )


def token(log_ratios_T: Tensor, sequence_T: Tensor) -> Tensor:
    """w_t = pi(y_t | y_<t) / mu(y_t | y_<t).

    Source: PPO (arXiv 1707.06347), equation 6; PipelineRL (arXiv 2509.19128), equation 5. Biased
    for whole sequences, since the tokens before t were sampled from mu too, and of far lower
    variance.
    """
    del sequence_T
    return _exp(log_ratios_T)


def sequence(log_ratios_T: Tensor, sequence_T: Tensor) -> Tensor:
    """w = prod_t pi(y_t) / mu(y_t), the same for every token of the sequence.

    Source: the importance weight of a whole action, as RLOO (arXiv 2402.14740) takes a completion
    for one. Unbiased; its variance grows exponentially with the length.
    """
    return _exp(sums_per_sequence(log_ratios_T, sequence_T))


def geometric(log_ratios_T: Tensor, sequence_T: Tensor) -> Tensor:
    """s = (prod_t pi(y_t) / mu(y_t))^(1/n), n trained tokens, the same for every token of the
    sequence.

    Source: GSPO (arXiv 2507.18071), equation 7.
    """
    return _exp(
        sums_per_sequence(log_ratios_T, sequence_T)
        / lengths_per_sequence(sequence_T, log_ratios_T.dtype)
    )


def none(log_ratios_T: Tensor, sequence_T: Tensor) -> Tensor:
    """w = 1: the tokens are treated as on-policy."""
    del sequence_T
    return torch.ones_like(log_ratios_T)


IMPORTANCE: Mapping[str, ImportanceFunction] = {
    "token": token,
    "sequence": sequence,
    "geometric": geometric,
    "none": none,
}
