"""Advantages from a value head: generalised advantage estimation over the trained tokens of each
sequence.

Shape suffix T: the trained tokens of a packed row, each sequence's in order.
"""

import torch
from torch import Tensor


def generalized_advantages(
    returns_T: Tensor, values_T: Tensor, sequence_T: Tensor, *, discount: float, gae_lambda: float
) -> Tensor:
    """A_t = delta_t + discount lambda A_{t+1} with delta_t = r_t + discount v_{t+1} - v_t; v and A
    are 0 behind the last token.

    Returns are R_t = r_t + discount R_{t+1}, so delta_t = e_t - discount e_{t+1} with the error e_t
    = R_t - v_t: rewards need not be known one by one. With lambda = 1 the sum telescopes to A_t =
    e_t, return minus value, which is exact then. Source: GAE (arXiv 1506.02438), equations 11 and
    16; lambda = 1 is PipelineRL (arXiv 2509.19128), equation 5.
    """
    errors_T = returns_T - values_T
    if gae_lambda == 1.0:
        return errors_T
    is_last_T = torch.ones_like(sequence_T, dtype=torch.bool)
    is_last_T[:-1] = sequence_T[1:] != sequence_T[:-1]
    next_errors_T = errors_T.roll(-1).masked_fill(is_last_T, 0.0)
    deltas = (errors_T - discount * next_errors_T).tolist()
    advantages: list[float] = []
    advantage = 0.0
    for delta, is_last in zip(reversed(deltas), reversed(is_last_T.tolist()), strict=True):
        advantage = delta + (0.0 if is_last else discount * gae_lambda * advantage)
        advantages.append(advantage)
    return errors_T.new_tensor(advantages[::-1])
