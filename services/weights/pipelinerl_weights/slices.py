"""Blocks: hyper-rectangles of the manifest's tensors, the unit in which weights are held, needed
and sent.

A trainer rank holds blocks (its ZeRO-3 partition, or everything), a generator's worker needs blocks
(its tensor-parallel slices), and a slice plan says which rank sends which block to whom. The bytes
of a block travel in C order of the block, so both ends see the same bytes whatever the strides of
their own storage are.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise, product, takewhile
from typing import NamedTuple, Protocol

from torch import Tensor

from pipelinerl_common.errors import MalformedMessage
from pipelinerl_weights.manifest import ITEM_BYTES, Manifest

Shape = tuple[int, ...]


class Block(NamedTuple):
    """A hyper-rectangle of one tensor. Example: Block(3, (0, 64), (128, 64)) is the right half of
    the columns of a [128, 128] tensor, the manifest's fourth.
    """

    tensor: int
    """Index in the manifest."""
    start: Shape
    size: Shape

    @property
    def num_items(self) -> int:
        return math.prod(self.size)


class WeightSink(Protocol):
    """The weights of a generator's worker, as the receiver writes them."""

    @property
    def needs(self) -> Sequence[Block]:
        """The blocks that this worker loads from a checkpoint; constant in a group. They may
        overlap.
        """
        ...

    def write(self, pieces: Sequence[tuple[Block, Tensor]]) -> None:
        """Takes each block from its 1-d uint8 view, which is used again after the call."""
        ...


def whole(index: int, shape: Shape) -> Block:
    """Returns the block of all of tensor `index`."""
    return Block(index, (0,) * len(shape), shape)


def whole_tensors(manifest: Manifest) -> tuple[Block, ...]:
    """Returns one block for every tensor of `manifest` that has items."""
    blocks = (whole(index, spec.shape) for index, spec in enumerate(manifest.tensors))
    return tuple(block for block in blocks if block.num_items)


def num_bytes(manifest: Manifest, block: Block) -> int:
    """Bytes of `block` without padding."""
    return block.num_items * ITEM_BYTES[manifest.tensors[block.tensor].dtype]


def blocks_of_range(index: int, shape: Shape, begin: int, end: int) -> tuple[Block, ...]:
    """Returns the items `begin` to `end` (flat, C order) of a tensor as blocks: at most 2 d - 1 of
    them for d dimensions, in the order of the items. Example: items 3 to 9 of a [3, 4] tensor are
    the last item of row 0, row 1, and the first item of row 2.
    """
    begin, end = max(0, begin), min(end, math.prod(shape))
    if begin >= end:
        return ()
    if len(shape) <= 1:
        return (Block(index, (begin,) * len(shape), (end - begin,) * len(shape)),)
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:  # within one row
        return tuple(_in_row(index, shape, last, begin - last * row, end - last * row))
    blocks = list(_in_row(index, shape, first - 1, begin - (first - 1) * row, row))
    if last > first:
        blocks.append(Block(index, (first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])))
    blocks.extend(_in_row(index, shape, last, 0, end - last * row))
    return tuple(blocks)


def _in_row(index: int, shape: Shape, row: int, begin: int, end: int) -> Iterator[Block]:
    if begin < end and end - begin <= math.prod(shape[1:]):
        for inner in blocks_of_range(index, shape[1:], begin, end):
            yield Block(index, (row, *inner.start), (1, *inner.size))


def intersection(one: Block, other: Block) -> Block | None:
    """Returns the common part of two blocks, or None."""
    if one.tensor != other.tensor:
        return None
    start = tuple(map(max, one.start, other.start))
    size = tuple(
        min(one_start + one_size, other_start + other_size) - begin
        for one_start, one_size, other_start, other_size, begin in zip(
            one.start, one.size, other.start, other.size, start, strict=True
        )
    )
    return Block(one.tensor, start, size) if all(extent > 0 for extent in size) else None


def contains(outer: Block, inner: Block) -> bool:
    """Returns whether all of `inner` is in `outer`."""
    return intersection(outer, inner) == inner


def are_disjoint(blocks: Sequence[Block]) -> bool:
    """Returns whether no two of one tensor's blocks have an item in common."""
    by_start = sorted(blocks)
    return not any(
        intersection(one, other)
        for position, one in enumerate(by_start)
        # In the order of the first axis: behind the end of `one` nothing meets it.
        for other in takewhile(partial(_begins_within, one), by_start[position + 1 :])
    )


def _begins_within(one: Block, other: Block) -> bool:
    return not one.start or other.start[0] < one.start[0] + one.size[0]


def cells(blocks: Iterable[Block]) -> list[Block]:
    """Cuts the union of one tensor's blocks into disjoint cells, so that every block is a union of
    cells. The cells are those of the grid of all the blocks' edges.
    """
    distinct = sorted(set(blocks))
    if len(distinct) <= 1:
        return distinct
    edges = [
        sorted({edge for block in distinct for edge in _edges(block, axis)})
        for axis in range(len(distinct[0].start))
    ]
    grid = (
        Block(distinct[0].tensor, tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
        for spans in product(*(list(pairwise(edge)) for edge in edges))
    )
    return [cell for cell in grid if any(contains(block, cell) for block in distinct)]


def _edges(block: Block, axis: int) -> tuple[int, int]:
    return block.start[axis], block.start[axis] + block.size[axis]


def split(block: Block, most_items: int) -> Iterator[Block]:
    """Yields `block` in parts of at most `most_items` items where its first dimensions allow it: a
    part is at least one row of the innermost dimension.
    """
    if block.num_items <= most_items:
        yield block
        return
    axis = next((axis for axis, extent in enumerate(block.size) if extent > 1), 0)
    row = block.num_items // block.size[axis]
    step = max(1, most_items // row)
    for offset in range(0, block.size[axis], step):
        extent = min(step, block.size[axis] - offset)
        start = (*block.start[:axis], block.start[axis] + offset, *block.start[axis + 1 :])
        part = Block(block.tensor, start, (*block.size[:axis], extent, *block.size[axis + 1 :]))
        if row > most_items:
            yield from split(part, most_items)
        else:
            yield part


def region(tensor: Tensor, block: Block) -> Tensor:
    """Returns the view of `block` in the full tensor."""
    for axis, (start, extent) in enumerate(zip(block.start, block.size, strict=True)):
        tensor = tensor.narrow(axis, start, extent)
    return tensor


def check_blocks(manifest: Manifest, blocks: Iterable[Block]) -> None:
    """Raises MalformedMessage for a block outside of its tensor."""
    for block in blocks:
        if not 0 <= block.tensor < len(manifest.tensors):
            raise MalformedMessage(
                f"block of tensor {block.tensor}: the manifest has {len(manifest.tensors)} tensors"
            )
        spec = manifest.tensors[block.tensor]
        fits = len(block.start) == len(block.size) == len(spec.shape) and all(
            start >= 0 and extent > 0 and start + extent <= size
            for start, extent, size in zip(block.start, block.size, spec.shape, strict=False)
        )
        if not fits:
            raise MalformedMessage(
                f"{spec.name} of shape {list(spec.shape)}: no block at {list(block.start)} of size "
                f"{list(block.size)}"
            )
