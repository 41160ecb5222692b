"""The loss of each trained token: importance weights, surrogates, KL estimators, value loss. A new
one is one function and one line in its table.

Importance weights are w = pi / mu: of each token alone, or of its whole sequence. mu is the
distribution that the token was sampled from, pi the current policy. All losses are per token and
not yet normalised: see objective.py.

Shape suffixes: T trained tokens of a packed row, N sequences of it. A sequence is never split over
rows, so a row knows all trained tokens of its sequences.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pipelinerl_common.settings import AlgorithmSettings

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


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The policy loss per token, whose gradient is the policy gradient, and the importance weights
    behind it.
    """

    loss_T: Tensor
    effective_weights_T: Tensor
    """The weights after truncation, masking, clipping or mixing, without gradient."""
    clipped_T: Tensor
    """True where a bound changed the token's gradient."""


SurrogateFunction = Callable[[Tensor, Tensor, Tensor, AlgorithmSettings], PolicyLoss]
"""(logprobs_T, weights_T, advantages_T, settings); only logprobs_T has a gradient."""


def score(
    logprobs_T: Tensor, weights_T: Tensor, advantages_T: Tensor, settings: AlgorithmSettings
) -> PolicyLoss:
    """REINFORCE with bounded importance weights: loss_t = -f(w_t) A_t log pi(y_t), no gradient
    through the weight.

    f truncates: min(c, w), or max(low, min(c, w)) with a lower bound; or it masks: w inside the
    bounds and 0 outside. c is
    `truncation` and low `truncation_low`.
    Source: PipelineRL (arXiv 2509.19128), equation 5; with the tokens' mean, CISPO (arXiv
    2506.13585), equation 4. Truncation biases the estimator only where a weight is beyond its
    bound.
    """
    low, high = settings.truncation_low, settings.truncation or torch.inf
    clipped_T = (weights_T > high) | (weights_T < low)
    bounded_T = (
        weights_T.masked_fill(clipped_T, 0.0)
        if settings.outside == "mask"
        else weights_T.clamp(low, high)
    )
    if settings.experimental.gradient_mixing > 0:
        bounded_T = mixed(bounded_T, settings.experimental.gradient_mixing)
    return PolicyLoss(-bounded_T * advantages_T * logprobs_T, bounded_T, clipped_T)


def mixed(weights_T: Tensor, share: float) -> Tensor:
    """(1 + m w) / (1 + m): the delayed gradient, whose weights are 1, and the importance-weighted
    one, mixed as 1 to m.

    Experimental: less variance than the weights alone, more bias; m to infinity is importance
    sampling, 0 none.
    """
    return (1.0 + share * weights_T) / (1.0 + share)


def clip(
    logprobs_T: Tensor, weights_T: Tensor, advantages_T: Tensor, settings: AlgorithmSettings
) -> PolicyLoss:
    """The clipped surrogate: loss_t = -min(w_t A_t, clip(w_t, 1 - low, 1 + high) A_t), whose
    gradient is that of the ratio.

    Source: PPO (arXiv 1707.06347), equation 7, per token as in GRPO (arXiv 2402.03300), equation 3;
    separate bounds as in DAPO (arXiv 2503.14476), equation 10. A token stops contributing once its
    weight is past the bound in its advantage's direction. With a weight of the whole sequence, each
    token has the sequence's weight and the gradient of its own log-probability, as in GSPO-token
    (arXiv 2507.18071), equation 14: summed over a sequence of one advantage it is the sequence
    weight's gradient.
    """
    low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
    ratio_T = weights_T * torch.exp(logprobs_T - logprobs_T.detach())
    loss_T = -torch.minimum(ratio_T * advantages_T, ratio_T.clamp(low, high) * advantages_T)
    clipped_T = ((weights_T > high) & (advantages_T > 0)) | ((weights_T < low) & (advantages_T < 0))
    return PolicyLoss(loss_T, weights_T.clamp(low, high), clipped_T)


SURROGATES: Mapping[str, SurrogateFunction] = {"score": score, "clip": clip}


KLFunction = Callable[[Tensor], Tensor]
"""log_ratios_T = log ref - log pi of sampled tokens -> an estimate of KL(pi || ref) per token.

Source: Schulman, "Approximating KL divergence" (2020). Exact in expectation (k1, k3) for tokens
sampled from pi; tokens of older versions bring an off-policy bias that the importance weights of
the policy loss correct and a penalty in the loss does not.
"""


def k1(log_ratios_T: Tensor) -> Tensor:
    """-r: unbiased, of either sign."""
    return -log_ratios_T


def k2(log_ratios_T: Tensor) -> Tensor:
    """r^2 / 2: biased and never negative; its gradient is k1 times that of log pi, which is the
    gradient of the divergence.
    """
    return 0.5 * log_ratios_T**2


def k3(log_ratios_T: Tensor) -> Tensor:
    """exp(r) - r - 1: unbiased, never negative, 0 where equal."""
    return torch.exp(log_ratios_T) - log_ratios_T - 1.0


KL_ESTIMATORS: Mapping[str, KLFunction] = {"k1": k1, "k2": k2, "k3": k3}


def kl_to_reference(logprobs_T: Tensor, ref_logprobs_T: Tensor, estimator: str) -> Tensor:
    """The estimate per token, with gradient; log-ratios are limited as importance weights are."""
    return KL_ESTIMATORS[estimator](
        (ref_logprobs_T - logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    )


def value_loss(values_T: Tensor, returns_T: Tensor) -> Tensor:
    """Half the squared error of the value head, whose gradient is v - R.

    Source: PipelineRL (arXiv 2509.19128), equation 5: v_phi is learned by squared error to the
    return.
    """
    return 0.5 * (values_T - returns_T) ** 2
