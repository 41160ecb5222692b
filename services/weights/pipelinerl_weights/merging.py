"""A frozen weight and its adapter as one dense weight."""

import torch
from torch import Tensor


@torch.no_grad()
def merge(weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> Tensor:
    """W + scale B A on the device and in the element type of A, a tensor of its own.

    Computed in float32 from the frozen weight and rounded once, so that nothing adds up from one
    update to the next. W is rounded to the element type before, as the trainer holds it.
    """
    merged_OI = weight_OI.to(a_RI.device, a_RI.dtype).to(torch.float32, copy=True)
    merged_OI.addmm_(b_OR.float(), a_RI.float(), alpha=scale)
    return merged_OI.to(a_RI.dtype)
