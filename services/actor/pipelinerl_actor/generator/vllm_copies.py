"""Second copies of a vLLM model's weights: the staging model that new weights are loaded into, and
the backup to roll back to.

vLLM keeps weights in three kinds of places: parameters and buffers; tensors derived from them (the
absorbed projections of latent attention); and, on a CPU, `cpu_linear`, a function that holds a
packed copy of the weight. All three belong to a copy.
"""

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    layerwise,
)

from pipelinerl_actor.generator.loader_record import record_needs
from pipelinerl_actor.generator.merged_weights import MergedWeights, without_effect
from pipelinerl_common.errors import FatalError
from pipelinerl_weights.manifest import Manifest
from pipelinerl_weights.slices import Block

_DERIVED = ("cpu_linear", "W_UK_T", "W_UV")


class Reload:
    """Loads checkpoint tensors into `model`, some tensors at a time, through vLLM's own loaders
    (sharding, fusing, packing).
    """

    def __init__(self, model: nn.Module, vllm_config: VllmConfig) -> None:
        self._model = model
        self._vllm_config = vllm_config
        _pack_experts_always(model)

    def needed_blocks(self, manifest: Manifest) -> tuple[Block, ...]:
        """Returns what this model loads of a checkpoint's tensors. The model stays as it is, but
        nothing may run it meanwhile.
        """
        model: Any = self._model
        with _only_recorded(self._model):
            return record_needs(model.load_weights, manifest)

    @torch.no_grad()
    def begin(self) -> None:
        initialize_layerwise_reload(self._model)

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """The tensors' memory must stay as it is until their layer is complete."""
        model: Any = self._model
        model.load_weights(tensors)

    def complete(self) -> None:
        """Everything has been loaded."""

    @torch.no_grad()
    def end(self) -> None:
        """Completes what is left, after a failure too; layers that got nothing keep theirs."""
        finalize_layerwise_reload(self._model, self._vllm_config.model_config)
        for module in _tied_and_packed(self._model):
            module.quant_method.process_weights_after_loading(module)


@contextlib.contextmanager
def _only_recorded(model: nn.Module) -> Iterator[None]:
    """Lets loads in the block reach their copies, into parameters on the meta device, and no layer
    be completed; afterwards every layer has the parameters that it had.
    """
    process = layerwise._layerwise_process
    layerwise._layerwise_process = lambda layer, info: None
    try:
        initialize_layerwise_reload(model)
        yield
    finally:
        layerwise._layerwise_process = process
        for layer in model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()


class AdapterReload:
    """Like Reload, for an update that brings an adapter: nothing is loaded before all of it has
    arrived.
    """

    def __init__(self, reload: Reload, merged: MergedWeights) -> None:
        self._reload = reload
        self._merged = merged
        self._has_loaded = False
        self.adapter: dict[str, Tensor] = {}

    def begin(self) -> None: ...

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """The tensors' memory must stay as it is."""
        self.adapter.update(tensors)

    def complete(self) -> None:
        self._has_loaded = True
        self._load(self.adapter)

    def end(self) -> None: ...

    def undo(self, served: Mapping[str, Tensor]) -> None:
        """Restores the adapter that was served before, or the frozen weights without one."""
        if self._has_loaded:
            self._load(served or without_effect(self.adapter))

    def _load(self, adapter: Mapping[str, Tensor]) -> None:
        self._reload.begin()
        try:
            self._reload.load(self._merged.of(adapter))
        finally:
            self._reload.end()


class StagingModel:
    """A second model of the same kind on the same device, which never runs. `swap_in` makes its
    weights the live ones.
    """

    def __init__(self, live: nn.Module, vllm_config: VllmConfig) -> None:
        """Must run on the thread that loaded the live model, before anything decodes: building a
        model uses vLLM's global state.
        """
        config = copy.copy(vllm_config)
        config.compilation_config = copy.copy(vllm_config.compilation_config)
        # Attention layers register themselves by name here; the live model's must stay the
        # registered ones.
        config.compilation_config.static_forward_context = {}
        config.compilation_config.static_all_moe_layers = []
        self._live = live
        with set_current_vllm_config(config), _own_rotary_embeddings():
            self._staging = get_model(vllm_config=config)
        if _names(live) != _names(self._staging):
            raise FatalError(
                f"{type(live).__name__} cannot be built twice alike: use "
                "weightTransfer.mode=inplace"
            )
        self.reload = Reload(self._staging, config)

    @torch.no_grad()
    def swap_in(self) -> None:
        """Swaps pointers on a CPU, and copies into the live storage on a device, since captured
        graphs point to it.
        """
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        seen: set[int] = set()
        for live, staging in zip(self._live.modules(), self._staging.modules(), strict=True):
            if live is staging:
                raise FatalError(
                    f"{type(live).__name__} is shared with the staging model: use "
                    "weightTransfer.mode=inplace"
                )
            for target, source in _pairs(live, staging):
                if id(target) in seen:
                    continue  # tied weights
                seen.add(id(target))
                if target.device.type == "cpu":
                    target.data, source.data = source.data, target.data
                else:
                    targets.append(target.data)
                    sources.append(source.data)
            for name in _DERIVED:
                mine, theirs = getattr(live, name, None), getattr(staging, name, None)
                if isinstance(mine, Tensor) and mine.device.type != "cpu":
                    targets.append(mine)
                    sources.append(_tensor(theirs))
                elif mine is not None:
                    setattr(live, name, theirs)
                    setattr(staging, name, mine)
        if targets:
            # One call for all tensors: thousands of single copies would lengthen the pause.
            torch._foreach_copy_(targets, sources)
            torch.accelerator.synchronize()


@contextlib.contextmanager
def _own_rotary_embeddings() -> Iterator[None]:
    """Gives the models built in the block their own tables, which vLLM shares between all models of
    a process: a reload of the staging model empties every module while it lasts, and would take
    them from the live one in the middle of its decode.
    """
    shared = dict(_ROPE_DICT)
    _ROPE_DICT.clear()
    try:
        yield
    finally:
        _ROPE_DICT.clear()
        _ROPE_DICT.update(shared)


class Backup:
    """A copy of a model's weights in host memory, taken while it decodes."""

    @torch.no_grad()
    def __init__(self, model: nn.Module) -> None:
        self._tensors = [
            (tensor, tensor.detach().to("cpu", copy=True)) for tensor in _own_tensors(model)
        ]
        # An update replaces a packed function and never changes it: the old one is its own backup.
        self._functions = [
            (module, module.cpu_linear)
            for module in model.modules()
            if hasattr(module, "cpu_linear")
        ]

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, saved in self._tensors:
            tensor.data.copy_(saved)
        for module, function in self._functions:
            module.cpu_linear = function
        if any(tensor.device.type != "cpu" for tensor, _ in self._tensors):
            torch.accelerator.synchronize()


def _pairs(live: nn.Module, staging: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """The module's own tensors with their counterparts."""
    for kind in ("_parameters", "_buffers"):
        mine: dict[str, Any] = getattr(live, kind)
        theirs: dict[str, Any] = getattr(staging, kind)
        for name, tensor in mine.items():
            if tensor is not None:
                yield tensor, _tensor(theirs.get(name))


def _tied_and_packed(model: nn.Module) -> Iterator[Any]:
    """Modules with a packed copy of another module's weight, which a reload of that module does not
    repack.
    """
    owners: dict[int, nn.Module] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if (
            weight is not None
            and owners.setdefault(id(weight), module) is not module
            and hasattr(module, "cpu_linear")
        ):
            yield module


def _pack_experts_always(model: nn.Module) -> None:
    """Packs the weights of a mixture's experts after every load on a CPU, where their kernels read
    packed weights: vLLM 0.32 packs them at the first load only, and after a reload they would be
    read in the wrong order.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if (
            getattr(method, "moe_kernel", None) is not None
            and next(module.parameters()).device.type == "cpu"
        ):
            method._setup_kernel = partial(_set_up_packed, method)


def _set_up_packed(method: Any, layer: nn.Module, w13: Tensor, w2: Tensor) -> None:
    type(method)._setup_kernel(method, layer, w13, w2)
    method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def _own_tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        for name in _DERIVED:
            value = getattr(module, name, None)
            if isinstance(value, Tensor):
                yield value


def _names(model: nn.Module) -> list[str]:
    names = [name for name, _ in model.named_modules()]
    return (
        names
        + [name for name, _ in model.named_parameters()]
        + [name for name, _ in model.named_buffers()]
    )


def _tensor(value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise FatalError("the staging model lost a tensor that the live one has")
    return value
