"""The slice plan: every rank gets what it needs exactly once, links carry even shares."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl_common.errors import MalformedMessage, PermanentError
from pipelinerl_weights.manifest import Manifest, TensorSpec
from pipelinerl_weights.plan import HELD_CHUNKS, PlanPart, SlicePlan, make_plan
from pipelinerl_weights.slices import (
    Block,
    blocks_of_range,
    cells,
    contains,
    intersection,
    num_bytes,
    split,
    whole,
    whole_tensors,
)

BUCKET_BYTES = 1 << 20

shapes = st.lists(st.integers(1, 6), max_size=3).map(tuple)


def items_of(block: Block) -> set[tuple[int, ...]]:
    """The coordinates of every item."""
    found: set[tuple[int, ...]] = {()}
    for start, extent in zip(block.start, block.size, strict=True):
        found = {(*item, start + offset) for item in found for offset in range(extent)}
    return found


@given(shapes, st.integers(0, 250), st.integers(0, 250))
def test_blocks_of_a_flat_range_are_its_items_once(
    shape: tuple[int, ...], begin: int, end: int
) -> None:
    blocks = blocks_of_range(7, shape, begin, end)
    items = [item for block in blocks for item in items_of(block)]
    flat = [
        sum(at * math.prod(shape[axis + 1 :]) for axis, at in enumerate(item)) for item in items
    ]
    assert sorted(flat) == list(range(begin, min(end, math.prod(shape))))
    assert len(blocks) <= max(1, 2 * len(shape) - 1)


def test_a_plan_of_many_ranks_flat_partitions_is_made_at_once() -> None:
    """24 ranks, which do not divide the rows: every partition begins and ends within one."""
    shape, num_ranks = (5120, 25600), 24
    manifest = Manifest(tuple(TensorSpec(f"w{i}", "bfloat16", shape) for i in range(4)), 64 << 20)
    part = -(-math.prod(shape) // num_ranks)
    holds = {
        rank: [
            block
            for index in range(4)
            for block in blocks_of_range(index, shape, rank * part, (rank + 1) * part)
        ]
        for rank in range(num_ranks)
    }
    needs = {
        num_ranks + worker: [Block(index, (0, worker * 6400), (5120, 6400)) for index in range(4)]
        for worker in range(4)
    }
    hosts = {rank: f"host {rank // 8}" for rank in range(num_ranks + 4)}
    plan = make_plan(manifest, holds, needs, hosts)
    pieces = sum(len(chunk.blocks) for chunk in plan.chunks)
    assert pieces < 4 * 4 * 5 * num_ranks  # a grid over all edges has 2,000 times as many
    arrived = sum(chunk.num_bytes for chunk in plan.chunks)
    assert manifest.num_bytes <= arrived <= 1.001 * manifest.num_bytes


@given(st.data())
def test_cells_cut_overlapping_blocks_apart(data: st.DataObject) -> None:
    def block() -> Block:
        start = tuple(data.draw(st.integers(0, 4)) for _ in range(2))
        return Block(0, start, tuple(data.draw(st.integers(1, 4)) for _ in range(2)))

    blocks = [block() for _ in range(data.draw(st.integers(1, 4)))]
    found = cells(blocks)
    counts = Counter(item for cell in found for item in items_of(cell))
    assert set(counts) == set().union(*map(items_of, blocks))
    assert set(counts.values()) == {1}
    for cell, one in ((cell, one) for cell in found for one in blocks):
        assert contains(one, cell) or intersection(one, cell) is None


@given(shapes, st.integers(1, 40))
def test_a_split_block_keeps_its_items(shape: tuple[int, ...], most: int) -> None:
    parts = list(split(whole(0, shape), most))
    assert Counter(item for part in parts for item in items_of(part)) == Counter(
        items_of(whole(0, shape))
    )
    assert all(part.num_items <= most for part in parts)


class Layout:
    """A job: tensors, holdings by ZeRO stage, needs by tensor-parallel size of each generator."""

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], trainers: int, zero: int, generators: Sequence[int]
    ) -> None:
        specs = [TensorSpec(f"w{index}", "bfloat16", shape) for index, shape in enumerate(shapes)]
        self.manifest = Manifest(tuple(specs), BUCKET_BYTES)
        self.holdings = {rank: self.held(rank, trainers, zero) for rank in range(trainers)}
        self.needs: dict[int, tuple[Block, ...]] = {}
        self.hosts = {rank: f"trainer-{rank}" for rank in range(trainers)}
        for number, parallel in enumerate(generators):
            for worker in range(parallel):
                rank = trainers + len(self.needs)
                self.needs[rank] = self.needed(worker, parallel)
                self.hosts[rank] = f"generator-{number // 2}"

    def held(self, rank: int, ranks: int, zero: int) -> tuple[Block, ...]:
        if zero < 3:
            return whole_tensors(self.manifest)
        blocks: list[Block] = []
        for index, spec in enumerate(self.manifest.tensors):
            share = -(-math.prod(spec.shape) // ranks)
            blocks += blocks_of_range(index, spec.shape, rank * share, (rank + 1) * share)
        return tuple(blocks)

    def needed(self, worker: int, parallel: int) -> tuple[Block, ...]:
        blocks: list[Block] = []
        for index, spec in enumerate(self.manifest.tensors):
            axis = index % 3  # rows, columns, or all of it
            if axis >= len(spec.shape) or spec.shape[axis] % parallel:
                blocks.append(whole(index, spec.shape))
                continue
            extent = spec.shape[axis] // parallel
            start, size = [0] * len(spec.shape), list(spec.shape)
            start[axis], size[axis] = worker * extent, extent
            blocks.append(Block(index, tuple(start), tuple(size)))
        return tuple(blocks)

    def plan(self) -> SlicePlan:
        return make_plan(self.manifest, self.holdings, self.needs, self.hosts)


def walk(plan: SlicePlan, layout: Layout) -> dict[int, list[Block]]:
    """Follows every hop and returns what each rank received; holds the rules of rounds."""
    owned: dict[int, set[int]] = defaultdict(set)
    for chunk, origin in enumerate(plan.origins):
        owned[origin].add(chunk)
    received: dict[int, list[Block]] = defaultdict(list)
    for hops in plan.rounds:
        assert max(Counter(source for _, source, _ in hops).values()) == 1
        assert max(Counter(to for _, _, to in hops).values()) == 1
        for chunk, source, _ in hops:
            assert chunk in owned[source], "a chunk is sent before it arrived"
        for chunk, _, to in hops:
            assert chunk not in owned[to], "a chunk arrives twice"
            owned[to].add(chunk)
            received[to] += plan.chunks[chunk].blocks
    return received


layouts = st.builds(
    Layout,
    st.lists(
        st.sampled_from([(), (5,), (8, 4), (4, 8), (2, 4, 4), (7, 3)]), min_size=1, max_size=7
    ),
    st.integers(1, 4),
    st.sampled_from([1, 3]),
    st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=6),
)


@settings(max_examples=150, deadline=None)
@given(layouts)
def test_every_worker_gets_what_it_needs_exactly_once(layout: Layout) -> None:
    plan = layout.plan()
    received = walk(plan, layout)
    for rank, needed in layout.needs.items():
        got = Counter((block.tensor, item) for block in received[rank] for item in items_of(block))
        wanted = Counter((block.tensor, item) for block in needed for item in items_of(block))
        assert got == wanted
    for chunk, origin in zip(plan.chunks, plan.origins, strict=True):
        for block in chunk.blocks:
            assert any(contains(held, block) for held in layout.holdings[origin])


@settings(max_examples=100, deadline=None)
@given(layouts)
def test_each_byte_enters_a_host_once(layout: Layout) -> None:
    plan = layout.plan()
    entered: dict[str, Counter[tuple[int, tuple[int, ...]]]] = defaultdict(Counter)
    for hops in plan.rounds:
        for chunk, source, to in hops:
            if layout.hosts[source] != layout.hosts[to]:
                for block in plan.chunks[chunk].blocks:
                    entered[layout.hosts[to]].update(
                        (block.tensor, item) for item in items_of(block)
                    )
    assert all(set(counts.values()) == {1} for counts in entered.values())


@settings(max_examples=50, deadline=None)
@given(layouts)
def test_parts_are_the_plan_and_survive_json(layout: Layout) -> None:
    plan = layout.plan()
    world_size = len(layout.hosts)
    for rank, part in enumerate(plan.parts(world_size)):
        assert part == plan.part(rank)
        document = json.loads(json.dumps(part.to_json()))
        assert PlanPart.from_json(layout.manifest, document) == part


def link_bytes(plan: SlicePlan, hosts: Mapping[int, str]) -> tuple[Counter[str], Counter[str]]:
    """Bytes that leave and enter every host."""
    leaving: Counter[str] = Counter()
    entering: Counter[str] = Counter()
    for source, to, size in plan.traffic():
        if hosts[source] != hosts[to]:
            leaving[hosts[source]] += size
            entering[hosts[to]] += size
    return leaving, entering


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("generators", [[2] * 4, [2] * 8, [4] * 24, [1, 2, 4, 4]])
def test_no_link_carries_more_than_about_one_model(zero: int, generators: list[int]) -> None:
    layout = Layout([(256, 512), (512, 256), (2048, 256), (256, 2048)] * 12, 4, zero, generators)
    leaving, entering = link_bytes(layout.plan(), layout.hosts)
    model = layout.manifest.num_bytes
    assert max(entering.values()) <= 1.001 * model
    assert max(leaving.values()) <= 1.1 * model
    trainers = [leaving[f"trainer-{rank}"] for rank in range(4)]
    assert max(trainers) <= 1.1 * sum(trainers) / 4


def test_a_rank_never_holds_more_chunks_than_it_has_buffers_for() -> None:
    layout = Layout([(256, 512)] * 24, 1, 1, [2] * 12)
    plan = layout.plan()
    onward: dict[tuple[int, int], int] = Counter(
        (chunk, source) for hops in plan.rounds for chunk, source, _ in hops
    )
    held: dict[int, dict[int, int]] = defaultdict(dict)
    for hops in plan.rounds:
        for chunk, source, to in hops:
            if chunk in held[source]:
                held[source][chunk] -= 1
                if not held[source][chunk]:
                    del held[source][chunk]
            if onward[chunk, to]:
                held[to][chunk] = onward[chunk, to]
        assert all(len(chunks) <= HELD_CHUNKS for chunks in held.values())


def test_what_nobody_holds_is_named() -> None:
    layout = Layout([(8, 4), (8, 4)], 2, 3, [1])
    layout.holdings[1] = layout.holdings[1][:1]
    with pytest.raises(PermanentError, match="w1: no trainer rank holds"):
        layout.plan()


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"chunks": [[0, 0, [[9, [0], [1]]]]], "rounds": []},
        {"chunks": [], "rounds": [[[[1]], []]]},
    ],
)
def test_a_damaged_part_is_refused(document: dict[str, Any]) -> None:
    layout = Layout([(8, 4)], 1, 1, [1])
    with pytest.raises(MalformedMessage, match="slice plan"):
        PlanPart.from_json(layout.manifest, document)


def test_bytes_of_a_block() -> None:
    layout = Layout([(8, 4)], 1, 1, [1])
    assert num_bytes(layout.manifest, Block(0, (2, 1), (3, 2))) == 12
