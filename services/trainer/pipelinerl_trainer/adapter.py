"""Low-rank adapters (LoRA, arXiv 2106.09685): y = W x + (alpha / rank) B A x, with W frozen and A,
B trained.

A is drawn as PEFT draws it (Kaiming uniform with a = sqrt 5) and B is 0, so that training begins at
the model itself. Our own layer and not the `peft` package's, which was looked at: it wraps a
layer and renames its weight (`base_layer.weight`), whereas loading, gathering and export here go by
the checkpoint's names.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import AdapterSettings
from pipelinerl_common.text import close_matches
from pipelinerl_weights.adapter import WEIGHT, a_name, b_name, merge

_NAMED, _NEAR = 12, 3
"""Largest numbers of names in an error."""


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter beside its frozen weight."""

    def __init__(self, frozen: nn.Linear, rank: int, scale: float) -> None:
        weight_OI = frozen.weight
        super().__init__(
            frozen.in_features, frozen.out_features, bias=frozen.bias is not None, device="meta"
        )
        self.weight, self.bias = frozen.weight, frozen.bias
        kind: dict[str, Any] = {"bias": False, "device": weight_OI.device, "dtype": weight_OI.dtype}
        self.lora_A: Any = nn.Linear(self.in_features, rank, **kind)
        self.lora_B: Any = nn.Linear(rank, self.out_features, **kind)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = linear(x, self.weight, self.bias)
        change: Tensor = self.lora_B(self.lora_A(x))
        return y + self.scale * change


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapters of one model, by the names of their layers."""

    settings: AdapterSettings
    base_model: str
    """Where the frozen model comes from, for users who load the adapter elsewhere."""
    layers: Mapping[str, AdaptedLinear]
    targets: tuple[str, ...]
    """The shortest names that pick these layers and no other."""

    @classmethod
    def attach(
        cls, language_model: nn.Module, settings: AdapterSettings, seed: int, base_model: str = ""
    ) -> "Adapter":
        """Freezes the model and gives the chosen layers of its decoder an adapter each, the same
        for the same seed.

        Raises SettingsError for a target that is no linear layer of the decoder.
        """
        language_model.requires_grad_(requires_grad=False)
        linears = _decoder_linears(language_model)
        chosen = _choose(linears, settings.target_modules)
        generator = torch.Generator().manual_seed(seed)
        layers: dict[str, AdaptedLinear] = {}
        for name in chosen:
            layers[name] = AdaptedLinear(linears[name], settings.rank, settings.scale)
            _initialize(layers[name], generator)
            parent, _, attribute = name.rpartition(".")
            setattr(language_model.get_submodule(parent), attribute, layers[name])
        return cls(settings, base_model, layers, _targets(chosen, language_model))

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields A and B of every layer, in the order of the layers."""
        for name, layer in self.layers.items():
            yield a_name(name), layer.lora_A.weight
            yield b_name(name), layer.lora_B.weight

    def parts_of(self, name: str) -> list[nn.Parameter]:
        """Returns the A and B that `merged` needs for a weight of this name, or nothing."""
        layer = self._layer(name)
        return [] if layer is None else [layer.lora_A.weight, layer.lora_B.weight]

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Returns `weight` merged with its adapter, if it has one."""
        layer = self._layer(name)
        return (
            weight
            if layer is None
            else merge(weight, layer.lora_A.weight, layer.lora_B.weight, layer.scale)
        )

    def _layer(self, name: str) -> AdaptedLinear | None:
        return self.layers.get(name.removesuffix(WEIGHT)) if name.endswith(WEIGHT) else None

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads A and B of every layer. Raises ValueError when they belong to other layers."""
        parameters = dict(self.parameters())
        different = sorted(parameters.keys() ^ tensors.keys())
        different += [
            name
            for name in parameters
            if name in tensors and tensors[name].shape != parameters[name].shape
        ]
        if different:
            raise ValueError(f"the adapter has other tensors or shapes, such as {different[0]}")
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])

    def facts(self) -> dict[str, Any]:
        """Returns what two adapters must have in common for tensors of one to fit the other."""
        return {
            "rank": self.settings.rank,
            "alpha": self.settings.alpha,
            "targets": list(self.targets),
        }

    def peft_config(self) -> dict[str, Any]:
        """Returns the content of PEFT's adapter_config.json."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base_model,
            "r": self.settings.rank,
            "lora_alpha": self.settings.alpha,
            "lora_dropout": 0.0,
            "target_modules": list(self.targets),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }


@torch.no_grad()
def _initialize(layer: AdaptedLinear, generator: torch.Generator) -> None:
    """Draws A on the host in float32, whatever the layer's device and element type are."""
    a_RI = torch.empty(layer.lora_A.weight.shape)
    nn.init.kaiming_uniform_(a_RI, a=math.sqrt(5), generator=generator)
    layer.lora_A.weight.copy_(a_RI)
    layer.lora_B.weight.zero_()


def _decoder_linears(language_model: Any) -> dict[str, nn.Linear]:
    """Returns the decoder's linear layers, without the head, by their names in the model."""
    decoder = {id(module) for module in language_model.get_decoder().modules()}
    return {
        name: module
        for name, module in language_model.named_modules()
        if isinstance(module, nn.Linear) and id(module) in decoder
    }


def _choose(linears: Mapping[str, nn.Linear], targets: list[str] | None) -> list[str]:
    if not linears:
        raise SettingsError("model.adapter: the model's decoder has no linear layers")
    if targets is None:
        return list(linears)
    for target in targets:
        if not any(_matches(name, target) for name in linears):
            raise SettingsError(
                f"model.adapter.targetModules: no linear layer of the decoder is called {target}; "
                f"{_near(target, linears)}"
            )
    return [name for name in linears if any(_matches(name, target) for target in targets)]


def _matches(name: str, target: str) -> bool:
    """Applies PEFT's rule, so that an exported adapter picks the same layers."""
    return name == target or name.endswith(f".{target}")


def _near(target: str, linears: Mapping[str, nn.Linear]) -> str:
    leaves = list(dict.fromkeys(name.rpartition(".")[2] for name in linears))
    near = close_matches(target, leaves, most=_NEAR) or close_matches(target, linears, most=_NEAR)
    if near:
        return f"near it are {', '.join(near)}"
    return f"there are {', '.join(leaves[:_NAMED])}" + (" and more" if len(leaves) > _NAMED else "")


def _targets(chosen: list[str], language_model: nn.Module) -> tuple[str, ...]:
    """Returns the last parts of the names if no other linear layer ends so, else whole names."""
    leaves = tuple(dict.fromkeys(name.rpartition(".")[2] for name in chosen))
    linears = [
        name for name, module in language_model.named_modules() if isinstance(module, nn.Linear)
    ]
    picked = {name for name in linears if any(_matches(name, leaf) for leaf in leaves)}
    return leaves if picked == set(chosen) else tuple(chosen)
