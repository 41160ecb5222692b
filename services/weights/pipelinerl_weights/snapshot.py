"""A trainer rank's share of one version in host memory, and its opposite on a generator: tensors
that are put together from the blocks that arrive.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from pipelinerl_common.errors import PermanentError
from pipelinerl_common.text import counted
from pipelinerl_weights.manifest import ALIGNMENT, ITEM_BYTES, Manifest
from pipelinerl_weights.slices import Block, blocks_of_range, cells, region

Loader = Callable[[Iterable[tuple[str, Tensor]]], None]


class Extent(NamedTuple):
    """The items `begin` to `end` of one tensor, flat and in C order."""

    tensor: int
    """Index in the manifest."""
    begin: int
    end: int


def whole_extents(manifest: Manifest) -> tuple[Extent, ...]:
    """Returns all items of all tensors."""
    return tuple(
        Extent(index, 0, math.prod(spec.shape)) for index, spec in enumerate(manifest.tensors)
    )


def even_extents(manifest: Manifest, rank: int, num_ranks: int) -> tuple[Extent, ...]:
    """Returns the share of `rank` when ranks that hold every weight share the manifest's bytes
    evenly, in its order.
    """
    total, position = manifest.num_bytes, 0
    first, last = (total * part // num_ranks for part in (rank, rank + 1))
    extents: list[Extent] = []
    for index, spec in enumerate(manifest.tensors):
        item_bytes, count = ITEM_BYTES[spec.dtype], math.prod(spec.shape)
        # Both ends are rounded up, so that neighbours cut a tensor at the same item.
        begin, end = (
            min(count, max(0, -(-(edge - position) // item_bytes))) for edge in (first, last)
        )
        if begin < end:
            extents.append(Extent(index, begin, end))
        position += spec.num_bytes
    return tuple(extents)


@dataclass(frozen=True)
class WeightSnapshot:
    """The extents of one version that this rank sends, copied so that training can continue.

    They are in host memory, whatever sends them: on the device, the snapshots that are offered and
    the one that is sent would take several shares of the model there.
    """

    manifest: Manifest
    extents: tuple[Extent, ...]
    buffer: Tensor
    """1-d uint8 in host memory, the extents one behind the other."""

    @classmethod
    def empty(cls, manifest: Manifest, extents: Sequence[Extent]) -> "WeightSnapshot":
        """Returns a snapshot to be filled. Where there is a device its memory is pinned, which
        torch keeps for the next one.
        """
        size = sum(_padded(manifest, extent) for extent in extents)
        pinned = torch.cuda.is_available()
        buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return cls(manifest, tuple(extents), buffer)

    @classmethod
    def pack(cls, manifest: Manifest, tensors: Iterable[tuple[str, Tensor]]) -> "WeightSnapshot":
        """Returns a snapshot of all of `tensors`, as a trainer of one rank sends it. Raises
        PermanentError as `fill` does.
        """
        snapshot = cls.empty(manifest, whole_extents(manifest))
        snapshot.fill(tensors)
        return snapshot

    @torch.no_grad()
    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies this snapshot's extents of full `tensors` (any order, cast to the manifest's
        dtypes). An iterator that gathers one tensor at a time keeps only that one alive.

        Raises PermanentError that lists tensors which are missing, unknown, given twice, or of the
        wrong shape.
        """
        specs = {spec.name: index for index, spec in enumerate(self.manifest.tensors)}
        missing = dict.fromkeys(self.manifest.tensors[each.tensor].name for each in self.extents)
        for name, tensor in tensors:
            index = specs.pop(name, None)
            missing.pop(name, None)
            if index is None:
                raise PermanentError(f"{name} is not in the manifest, or was given twice")
            shape = self.manifest.tensors[index].shape
            if shape != tensor.shape:
                raise PermanentError(
                    f"{name} has shape {tuple(tensor.shape)}, the manifest says {shape}"
                )
            for position in self._by_tensor.get(index, ()):
                _, begin, end = self.extents[position]
                self.view(position).copy_(tensor.reshape(-1)[begin:end])
        if missing:
            names = ", ".join(list(missing)[:5])
            raise PermanentError(
                f"{counted(len(missing), 'tensor')} of the manifest not given: {names}"
            )

    def view(self, position: int) -> Tensor:
        """Returns the extent at `position` of `extents`, 1-d in the manifest's dtype."""
        index, begin, end = self.extents[position]
        spec = self.manifest.tensors[index]
        return view_items(self.buffer, self._offsets[position], spec.dtype, (end - begin,))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields names and tensors of a snapshot of whole tensors, as views."""
        for position, extent in enumerate(self.extents):
            spec = self.manifest.tensors[extent.tensor]
            yield spec.name, self.view(position).view(spec.shape)

    @property
    def num_bytes(self) -> int:
        return len(self.buffer)

    @property
    def holds(self) -> tuple[Block, ...]:
        """The extents as blocks."""
        return tuple(block for blocks in self._blocks.values() for block, _ in blocks)

    @torch.no_grad()
    def read(self, pieces: Iterable[tuple[Block, Tensor]]) -> None:
        """Copies each block, a part of one that is held, into its 1-d uint8 view."""
        for block, target in pieces:
            dtype = self.manifest.tensors[block.tensor].dtype
            held, offset = next(
                (held, offset)
                for held, offset in self._blocks[block.tensor]
                if _is_inside(block, held)
            )
            source = view_items(self.buffer, offset, dtype, held.size)
            inner = tuple(map(int.__sub__, block.start, held.start))
            view_items(target, 0, dtype, block.size).copy_(
                region(source, Block(block.tensor, inner, block.size)), non_blocking=True
            )

    @cached_property
    def _offsets(self) -> list[int]:
        offsets, end = [], 0
        for extent in self.extents:
            offsets.append(end)
            end += _padded(self.manifest, extent)
        return offsets

    @cached_property
    def _by_tensor(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for position, extent in enumerate(self.extents):
            found.setdefault(extent.tensor, []).append(position)
        return found

    @cached_property
    def _blocks(self) -> dict[int, list[tuple[Block, int]]]:
        """Blocks by tensor, with the byte at which each begins: the blocks of an extent follow one
        another in the order of its items.
        """
        found: dict[int, list[tuple[Block, int]]] = {}
        for (index, begin, end), offset in zip(self.extents, self._offsets, strict=True):
            spec = self.manifest.tensors[index]
            for block in blocks_of_range(index, spec.shape, begin, end):
                found.setdefault(index, []).append((block, offset))
                offset += block.num_items * ITEM_BYTES[spec.dtype]
        return found


@dataclass
class TensorAssembly:
    """Puts whole tensors together from arriving blocks and hands them to a model's loader. Of a
    tensor whose worker needs a slice only that slice is filled; the rest is uninitialised, and the
    loader does not look at it.
    """

    manifest: Manifest
    load: Loader
    """Called with the tensors that are complete, in fresh memory, which it may keep."""
    needs: tuple[Block, ...]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        self._open: dict[int, Tensor] = {}
        by_tensor: dict[int, list[Block]] = {}
        for block in self.needs:
            by_tensor.setdefault(block.tensor, []).append(block)
        self._missing = {
            index: sum(cell.num_items for cell in cells(blocks))
            for index, blocks in by_tensor.items()
        }

    @torch.no_grad()
    def write(self, pieces: Sequence[tuple[Block, Tensor]]) -> None:
        """Takes each block from its 1-d uint8 view, which is used again after the call."""
        complete: dict[int, None] = {}
        for block, source in pieces:
            index, spec = block.tensor, self.manifest.tensors[block.tensor]
            if index not in self._open:
                kind: torch.dtype = getattr(torch, spec.dtype)
                self._open[index] = torch.empty(spec.shape, dtype=kind, device=self.device)
            target = region(self._open[index], block)
            target.copy_(view_items(source, 0, spec.dtype, block.size))
            self._missing[index] -= block.num_items
            if self._missing[index] == 0:
                complete[index] = None
        if complete:
            self.load(
                [(self.manifest.tensors[index].name, self._open.pop(index)) for index in complete]
            )


def view_items(buffer: Tensor, offset: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Returns the tensor at `offset` bytes of a 1-d uint8 buffer, without a copy."""
    kind: torch.dtype = getattr(torch, dtype)
    return buffer[offset : offset + math.prod(shape) * kind.itemsize].view(kind).view(shape)


def _is_inside(inner: Block, outer: Block) -> bool:
    return all(
        a <= b and b + c <= a + d
        for a, b, c, d in zip(outer.start, inner.start, inner.size, outer.size, strict=True)
    )


def _padded(manifest: Manifest, extent: Extent) -> int:
    size = (extent.end - extent.begin) * ITEM_BYTES[manifest.tensors[extent.tensor].dtype]
    return -(-size // ALIGNMENT) * ALIGNMENT
