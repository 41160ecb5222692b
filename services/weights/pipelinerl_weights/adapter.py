"""Names of adapters' matrices on the wire: those of the layers that they belong to, with PEFT's
endings. Imports no torch.

    model.layers.0.mlp.up_proj.weight          the frozen weight W [out, in], which every side has from the model folder
    model.layers.0.mlp.up_proj.lora_A.weight   A [rank, in]
    model.layers.0.mlp.up_proj.lora_B.weight   B [out, rank]

What is served and exported is W + (alpha / rank) B A, see merging.py.
"""

A, B = "lora_A", "lora_B"
WEIGHT = ".weight"


def a_name(layer: str) -> str:
    return f"{layer}.{A}{WEIGHT}"


def b_name(layer: str) -> str:
    return f"{layer}.{B}{WEIGHT}"


def layer_of(name: str) -> str | None:
    """The layer whose A or B this is; None for any other tensor."""
    layer, _, kind = name.removesuffix(WEIGHT).rpartition(".")
    return layer if name.endswith(WEIGHT) and kind in (A, B) and layer else None
