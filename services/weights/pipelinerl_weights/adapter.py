"""Adapters on the wire: the names of their matrices, those of their layers with PEFT's endings, and
their merge into one dense weight.

    model.layers.0.mlp.up_proj.weight          frozen weight W [out, in], from the model folder
    model.layers.0.mlp.up_proj.lora_A.weight   A [rank, in]
    model.layers.0.mlp.up_proj.lora_B.weight   B [out, rank]

What is served and exported is W + (alpha / rank) B A.
"""

import torch
from torch import Tensor

A, B = "lora_A", "lora_B"
WEIGHT = ".weight"


def a_name(layer: str) -> str:
    return f"{layer}.{A}{WEIGHT}"


def b_name(layer: str) -> str:
    return f"{layer}.{B}{WEIGHT}"


def layer_of(name: str) -> str | None:
    """Returns the layer whose A or B this is; None for any other tensor."""
    layer, _, kind = name.removesuffix(WEIGHT).rpartition(".")
    return layer if name.endswith(WEIGHT) and kind in (A, B) and layer else None


@torch.no_grad()
def merge(weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> Tensor:
    """Returns W + scale B A as a new tensor on the device and in the element type of A.

    Computed in float32 from the frozen weight and rounded once, so that no error adds up from one
    update to the next. W is rounded to the element type first, as the trainer holds it.
    """
    merged_OI = weight_OI.to(a_RI.device, a_RI.dtype).to(torch.float32, copy=True)
    merged_OI.addmm_(b_OR.float(), a_RI.float(), alpha=scale)
    return merged_OI.to(a_RI.dtype)
