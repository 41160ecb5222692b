"""Recording of a loader: the parts that it copies, whatever views it takes on the way."""

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipelinerl_actor.generator.loader_record import block_of_view, record_needs
from pipelinerl_weights.manifest import Manifest, TensorSpec
from pipelinerl_weights.slices import Block, region, whole_tensors

MANIFEST = Manifest(
    (
        TensorSpec("rows", "float32", (8, 6)),
        TensorSpec("columns", "float32", (6, 8)),
        TensorSpec("turned", "float32", (6, 4)),
        TensorSpec("experts", "float32", (4, 2, 3)),
        TensorSpec("skipped", "float32", (5,)),
        TensorSpec("scaled", "float32", (4, 4)),
    ),
    bucket_bytes=1 << 20,
)


def load(weights: Iterable[tuple[str, Tensor]]) -> None:
    """Loads as the second of two workers."""
    tensors = dict(weights)
    parameter = torch.empty(4, 6, device="meta")
    for part in (
        tensors["rows"].narrow(0, 4, 4),
        tensors["columns"].chunk(2, dim=1)[1].t(),
        tensors["turned"].t(),
        tensors["experts"][2:].reshape(4, 3).repeat(1, 2),
        tensors["scaled"][:, 1:3].repeat(1, 3) * 2,
    ):
        parameter.copy_(part)


def test_the_parts_that_a_loader_reads_are_its_needs() -> None:
    assert record_needs(load, MANIFEST) == (
        Block(0, (4, 0), (4, 6)),
        Block(1, (0, 4), (6, 4)),
        Block(2, (0, 0), (6, 4)),
        Block(3, (0, 0, 0), (4, 2, 3)),  # joined dimensions are no block
        Block(5, (0, 1), (4, 2)),
    )


def test_a_loader_that_looks_at_values_needs_everything() -> None:
    assert record_needs(lambda weights: weights[0][1].tolist(), MANIFEST) == whole_tensors(MANIFEST)


@given(st.data())
def test_a_view_that_is_a_block_is_found(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    start = tuple(data.draw(st.integers(0, extent - 1)) for extent in shape)
    size = tuple(
        data.draw(st.integers(1, extent - first))
        for extent, first in zip(shape, start, strict=True)
    )
    block = Block(0, start, size)
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    view = region(tensor, block).permute(*data.draw(st.permutations(range(len(shape)))))
    assert block_of_view(0, shape, view) == block


@pytest.mark.parametrize(
    "view",
    [
        torch.zeros(4, 6).view(24)[2:9],
        torch.zeros(4, 6).as_strided((2, 2), (7, 1)),
        torch.zeros(4, 6).as_strided((3, 3), (1, 1)),
    ],
)
def test_a_view_that_is_no_block_is_not_taken_for_one(view: Tensor) -> None:
    assert block_of_view(0, (4, 6), view) is None
