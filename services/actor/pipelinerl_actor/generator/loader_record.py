"""Which parts of a checkpoint a worker of a tensor-parallel engine loads, found by recording the
engine's own loader once.

Each architecture of vLLM has a loader that cuts its shard out of whole tensors. Here it is given
tensors on the meta device, which have shapes and strides and no bytes, and every copy into a
parameter is looked at: the part of the source that it reads has to arrive over the network, the
rest of the tensor does not.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipelinerl_weights.manifest import Manifest
from pipelinerl_weights.slices import Block, whole, whole_tensors

log = logging.getLogger(__name__)


@torch.no_grad()
def record_needs(
    load: Callable[[list[tuple[str, Tensor]]], object], manifest: Manifest
) -> tuple[Block, ...]:
    """Returns the blocks of the manifest's tensors that `load` reads; nothing of a tensor that it
    skips. `load` must take tensors on the meta device and copy them into such tensors.

    A loader that cannot be recorded needs everything: its worker then receives whole tensors.
    """
    recorder = _Recorder(manifest)
    try:
        with recorder:
            load(recorder.sources)
    except Exception as error:  # noqa: BLE001 - the loaders of third parties may do anything
        log.warning("the loader cannot be recorded, so whole tensors are received: %r", error)
        return whole_tensors(manifest)
    return recorder.blocks()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's is untyped
    """Notes which parts of the source tensors are copied."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._manifest = manifest
        self.sources = [
            (spec.name, torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta"))
            for spec in manifest.tensors
        ]
        self._index = {_storage(source): i for i, (_, source) in enumerate(self.sources)}
        self._parts: dict[int, dict[Block, None]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        read = [each for each in _tensors(args) if _storage(each) in self._index]
        if func is torch.ops.aten.copy_.default:
            read = [each for each in read if each is args[1]]
            for source in read:
                self._note(source)
            return result
        kept = {_storage(each) for each in _tensors((result,))}
        for source in read:
            if _storage(source) not in kept:  # an operation that reads its bytes, and no view
                self._note(source)
        return result

    def blocks(self) -> tuple[Block, ...]:
        """Returns all parts that were read, in the manifest's order."""
        return tuple(
            block
            for index in sorted(self._parts)
            for block in self._parts[index]
            if block.num_items
        )

    def _note(self, part: Tensor) -> None:
        index = self._index[_storage(part)]
        whole_shape = self._manifest.tensors[index].shape
        block = block_of_view(index, whole_shape, part) or whole(index, whole_shape)
        self._parts.setdefault(index, {})[block] = None


def block_of_view(index: int, shape: tuple[int, ...], view: Tensor) -> Block | None:
    """Returns the block of a contiguous tensor of `shape` that a view of it shows; None when the
    view is no block, such as one that joins dimensions.
    """
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    start, rest = [], view.storage_offset()
    for stride in strides:
        start.append(rest // stride)
        rest %= stride
    size = [1] * len(shape)
    for extent, stride in zip(view.shape, view.stride(), strict=True):
        if extent == 1:
            continue
        # A dimension of one item has the stride of its neighbour, and is never the one meant.
        axes = [i for i, each in enumerate(strides) if each == stride and shape[i] > 1]
        if not axes or size[axes[0]] != 1 or start[axes[0]] + extent > shape[axes[0]]:
            return None
        size[axes[0]] = extent
    return Block(index, tuple(start), tuple(size))


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
