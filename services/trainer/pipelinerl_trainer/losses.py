"""What one trained token contributes to the loss. A new policy loss is one function and one line in `POLICY_LOSSES`.

Shape suffix T: the trained tokens of a packed row. All losses are per token and not yet normalised: the caller sums them and
divides by the number of sequences or of trained tokens of the whole step, over all ranks and micro-batches.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pipelinerl_common.settings import AlgorithmSettings

MAX_LOG_RATIO = 20.0
"""Log-ratios are limited to this before exp, so that one token sampled by a very different policy gives 5e8 and not inf."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Per token: the loss, whose gradient is the policy gradient, and what the metrics need about the importance weight."""

    loss_T: Tensor
    weights_T: Tensor
    """pi / mu before any truncation, without gradient."""
    effective_weights_T: Tensor
    """The weight that counted, after truncation or clipping, without gradient."""
    clipped_T: Tensor
    """True where truncation or clipping changed the token's gradient."""


PolicyLossFunction = Callable[[Tensor, Tensor, Tensor, AlgorithmSettings], PolicyLoss]


def importance_weights(logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
    """w_t = pi(y_t) / mu(y_t) = exp(log pi - log mu), mu being the distribution that the token was really sampled from."""
    return torch.exp((logprobs_T - old_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def reinforce(logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, settings: AlgorithmSettings) -> PolicyLoss:
    """REINFORCE with truncated importance weights: loss_t = -min(c, w_t) A_t log pi(y_t), no gradient through the weight.

    Source: PipelineRL (arXiv 2509.19128), equation 5; c is `truncation`. The estimator is biased only where w_t > c.
    """
    weights_T = importance_weights(logprobs_T.detach(), old_logprobs_T)
    truncated_T = weights_T.clamp(max=settings.truncation)
    return PolicyLoss(-truncated_T * advantages_T * logprobs_T, weights_T, truncated_T, weights_T > settings.truncation)


def clipped_ratio(logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, settings: AlgorithmSettings) -> PolicyLoss:
    """PPO's clipped surrogate: loss_t = -min(w_t A_t, clip(w_t, 1 - low, 1 + high) A_t), gradient through w_t.

    Source: PPO (arXiv 1707.06347), equation 7, per token as in GRPO (arXiv 2402.03300); separate bounds as in DAPO
    (arXiv 2503.14476). A token stops contributing once its weight has moved past the bound in its advantage's direction.
    """
    low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
    weights_T = importance_weights(logprobs_T, old_logprobs_T)
    loss_T = -torch.minimum(weights_T * advantages_T, weights_T.clamp(low, high) * advantages_T)
    weights_T = weights_T.detach()
    clipped_T = ((weights_T > high) & (advantages_T > 0)) | ((weights_T < low) & (advantages_T < 0))
    return PolicyLoss(loss_T, weights_T, weights_T.clamp(low, high), clipped_T)


POLICY_LOSSES: Mapping[str, PolicyLossFunction] = {
    "reinforce": reinforce,
    "ppo": clipped_ratio,
    "grpo": clipped_ratio,  # its advantages are divided by the group's standard deviation before they arrive here
}


def kl_to_reference(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """The k3 estimator of KL(pi || ref) per token: exp(r) - r - 1 with r = log ref - log pi; never negative, 0 where equal.

    Source: Schulman, "Approximating KL divergence" (2020), k3. Unbiased for tokens sampled from pi; tokens of older versions
    bring the off-policy bias that the importance weights of the policy loss correct and this penalty does not.
    """
    r_T = (ref_logprobs_T - logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.exp(r_T) - r_T - 1.0


def value_loss(values_T: Tensor, returns_T: Tensor) -> Tensor:
    """Half the squared error of the value head, whose gradient is v - R.

    Source: PipelineRL (arXiv 2509.19128), equation 5: v_phi is learned by squared error to the return.
    """
    return 0.5 * (values_T - returns_T) ** 2
