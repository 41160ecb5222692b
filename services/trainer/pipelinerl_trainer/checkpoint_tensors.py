"""A language model's parameters as the tensors of its checkpoint: the names and shapes that
generators load.

Most are stored as they are. The experts of a mixture are one parameter in memory, [experts, out,
in], and one tensor for each expert and projection in the checkpoint; transformers knows the
conversion of every architecture, and it is reversed here.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.text import counted

Shape = tuple[int, ...]


class CheckpointTensors:
    """Of one model. `stored` are the tensors of the folder that it was loaded from; without any,
    what transformers would save.

    Example: `mlp.experts.gate_up_proj` of [4, 2 * 24, 16] is `mlp.experts.0.gate_proj.weight` to
    `mlp.experts.3.up_proj.weight` of [24, 16] each.
    """

    def __init__(self, language_model: Any, stored: Mapping[str, Shape] | None = None) -> None:
        self._language_model = language_model
        self._kept = frozenset(stored or ())

    def of(self, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The stored tensors of the parameter `name`, always in the same order: views of `weight`
        or copies.
        """
        if name in self._kept:
            yield name, weight
        else:
            yield from revert_weight_conversion(self._language_model, {name: weight}).items()

    def shapes_of(self, name: str, shape: Shape) -> Iterator[tuple[str, Shape]]:
        for stored, tensor in self.of(name, torch.empty(shape, device="meta")):
            yield stored, tuple(tensor.shape)


def stored_shapes(folder: Path) -> dict[str, Shape]:
    """Of all tensors in a Hugging Face folder. Raises SettingsError."""
    shapes: dict[str, Shape] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                shapes |= {
                    name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()
                }  # noqa: SIM118
        except SafetensorError as error:
            raise SettingsError(
                f"model folder {folder}: {file.name} is not a safetensors file: {error}"
            ) from error
    return shapes


def check_tensors(
    tensors: CheckpointTensors, language_model: Any, stored: Mapping[str, Shape]
) -> None:
    """Weights are sent under names that generators know from the checkpoint. Raises SettingsError
    when one is none of them.
    """
    if not stored:
        return
    wrong = [
        name
        for parameter, weight in language_model.named_parameters()
        for name, shape in tensors.shapes_of(parameter, tuple(weight.shape))
        if stored.get(name) != shape
    ]
    if wrong:
        raise SettingsError(
            f"model.uri: {counted(len(wrong), 'weight')} named or shaped otherwise in the "
            "checkpoint than in memory, such as "
            f"{min(wrong)}; models of this kind are not supported"
        )
