"""Dense weights of an adapter update (LoRA), made from the model folder's weights and the adapter.

Generators serve W + (alpha / rank) B A and not W beside A and B: one adapter is served at a time,
always the newest, and kernels for many adapters would slow down every token without need. The KV
policies, the pause and the decode speed are those of full weights; only the transfer is small.

The frozen weights W stay in the files of the model folder, mapped into memory: no second copy on
the device, and one for all generators of a node. Every update starts from them, so rounding errors
do not accumulate.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from pipelinerl_weights.adapter import WEIGHT, a_name, b_name, layer_of, merge


class MergedWeights:
    """Merges adapters into the layers of a model folder.

    `fused` has the layers that an engine stores as one, by the ends of their names:
    {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}. When one of them has an adapter, all are merged.
    """

    def __init__(
        self, folder: Path, scale: float, fused: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self._scale = scale
        self._together = {part: tuple(parts) for parts in (fused or {}).values() for part in parts}
        self._files: dict[str, Any] = {}
        for file in sorted(folder.glob("*.safetensors")):
            opened: Any = safe_open(file, framework="pt")
            self._files.update(dict.fromkeys(opened.keys(), opened))
        self._names: dict[str, list[str]] = {}
        for name in self._files:
            self._names.setdefault(name.rpartition(".")[0], []).append(name)
        self._changed: dict[str, None] = {}
        """Layers that adapters have changed, in order."""

    def of(self, adapter: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint tensors of every layer that `adapter` (A and B by their names) changes, one
        layer after another, on its device and with its dtype.

        A layer that only an earlier adapter changed gets the folder's weights again.
        """
        given = dict.fromkeys(layer for name in adapter if (layer := layer_of(name)) is not None)
        for layer in given:
            self._changed.update(dict.fromkeys(self._with_fused(layer)))
        kind = next(iter(adapter.values()))
        for layer in tuple(self._changed):
            for name in self._names.get(layer, ()):
                tensor = self._files[name].get_tensor(name)
                if layer in given and name.endswith(WEIGHT):
                    yield (
                        name,
                        merge(tensor, adapter[a_name(layer)], adapter[b_name(layer)], self._scale),
                    )
                else:
                    yield name, tensor.to(kind.device, kind.dtype)

    def _with_fused(self, layer: str) -> list[str]:
        parent, _, part = layer.rpartition(".")
        return [f"{parent}.{other}" for other in self._together.get(part, (part,))]


def without_effect(adapter: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An adapter of the same layers that leaves the frozen weights as they are."""
    return {name: torch.zeros_like(tensor) for name, tensor in adapter.items()}
