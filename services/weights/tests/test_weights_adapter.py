"""An adapter on the wire: its names, and what it makes of the weight that it belongs to."""

import pytest
import torch

from pipelinerl_weights.adapter import a_name, b_name, layer_of, merge


def test_names_and_layers_are_each_other_s_inverse() -> None:
    layer = "model.layers.0.mlp.up_proj"
    assert a_name(layer) == "model.layers.0.mlp.up_proj.lora_A.weight"
    assert b_name(layer) == "model.layers.0.mlp.up_proj.lora_B.weight"
    assert layer_of(a_name(layer)) == layer_of(b_name(layer)) == layer
    for other in (
        f"{layer}.weight",
        f"{layer}.bias",
        f"{layer}.lora_A.bias",
        "lora_A.weight",
        f"{layer}.lora_A",
        "weight",
        "",
    ):
        assert layer_of(other) is None


def test_a_merged_weight_by_hand() -> None:
    weight, a, b = (
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        torch.tensor([[1.0, -1.0]]),
        torch.tensor([[2.0], [0.5]]),
    )
    merged = merge(weight, a, b, 0.5)
    assert torch.equal(merged, torch.tensor([[2.0, 1.0], [3.25, 3.75]]))
    assert torch.equal(weight, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert merge(weight, a, torch.zeros(2, 1), 0.5).data_ptr() != weight.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_rounded_once(dtype: torch.dtype) -> None:
    """To the nearest number of the type from the exact one: products that were rounded themselves
    would miss it.
    """
    generator = torch.Generator().manual_seed(0)
    weight, a, b = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((64, 48), (8, 48), (64, 8))
    )
    exact = weight.double() + 0.25 * b.double() @ a.double()
    merged = merge(weight, a, b, 0.25)
    assert merged.dtype == dtype
    assert torch.equal(merged, exact.to(dtype))
    assert not torch.equal(weight + 0.25 * (b @ a), exact.to(dtype))


def test_a_folder_of_another_type_is_rounded_as_the_trainer_rounds_it() -> None:
    weight = torch.tensor([[1.001]])
    a, b = (
        torch.tensor([[1.0]], dtype=torch.bfloat16),
        torch.tensor([[0.004]], dtype=torch.bfloat16),
    )
    assert float(weight.bfloat16()) == 1.0
    assert merge(weight, a, b, 1.0) == (1.0 + b.float()).bfloat16()
