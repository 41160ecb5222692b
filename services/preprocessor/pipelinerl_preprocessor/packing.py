"""Packs the sequences of a step into rows of a token budget, balanced over ranks.

1. Ranks: longest sequence first, each to the rank with the fewest tokens so far (LPT), so ranks get
   equal tokens.
2. Rows: best fit decreasing inside each rank gives the number of rows of the budget that it needs;
   every rank gets as many as the neediest one, because ranks must run the same number of
   micro-batches.
3. Inside its rows a rank spreads its sequences evenly where that fits, so that the i-th
   micro-batches of all ranks are of similar size; otherwise it keeps the best-fit rows and splits
   the fullest until it has enough.

A row is later cut to the slots that it uses, so spreading costs no padding.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SLOT_MULTIPLE = 8
"""Rows are cut to their used slots rounded up to this, which keeps kernels on aligned shapes."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where every sequence goes: `rows[rank][micro_batch]` holds indices into the lengths.

    Example: lengths (5, 3, 4), budget 8, two ranks: rows (((0,),), ((2, 1),)), tokens 5 and 7.
    """

    rows: tuple[tuple[tuple[int, ...], ...], ...]
    tokens: tuple[tuple[int, ...], ...]
    """Used slots of each row."""
    budget: int

    @property
    def num_micro_batches(self) -> int:
        """Rows of each rank."""
        return len(self.rows[0])

    def num_slots(self, rank: int, micro_batch: int) -> int:
        """Slots of a row: the used ones rounded up to SLOT_MULTIPLE, at most the budget; a filler
        row has the fewest.
        """
        used = self.tokens[rank][micro_batch]
        return min(max(-(-used // SLOT_MULTIPLE), 1) * SLOT_MULTIPLE, self.budget)

    @property
    def fill(self) -> float:
        """Share of slots that hold a token, padding and filler rows counted as empty."""
        slots = sum(
            self.num_slots(rank, row)
            for rank, rows in enumerate(self.rows)
            for row in range(len(rows))
        )
        return sum(map(sum, self.tokens)) / slots

    @property
    def budget_fill(self) -> float:
        """Share that would be filled if every row were as long as the budget."""
        return sum(map(sum, self.tokens)) / (self.budget * len(self.rows) * self.num_micro_batches)

    @property
    def imbalance(self) -> float:
        """(most - fewest) / most tokens of a rank; 0 for one rank."""
        per_rank = [sum(tokens) for tokens in self.tokens]
        return (max(per_rank) - min(per_rank)) / max(max(per_rank), 1)


def pack(lengths: Sequence[int] | NDArray[np.integer], budget: int, num_ranks: int) -> Assignment:
    """Assigns every sequence to one row of one rank, the same number of rows for all ranks, at
    least one.

    Deterministic. Raises ValueError for a length outside 1..budget or fewer than one rank.
    """
    lengths_N = np.asarray(lengths, dtype=np.int64)
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks} must be at least 1")
    if lengths_N.size and (lengths_N.min() < 1 or lengths_N.max() > budget):
        worst = int(lengths_N.max()) if lengths_N.max() > budget else int(lengths_N.min())
        raise ValueError(f"a sequence of {worst} tokens does not fit a row of 1 to {budget} slots")
    sizes = lengths_N.tolist()
    order = np.argsort(-lengths_N, kind="stable").tolist()
    ranks = _spread(order, sizes, num_ranks)
    fitted = [_best_fit(indices, sizes, budget) for indices in ranks]
    num_rows = max(max(map(len, fitted)), 1)
    rows = [
        _exactly(num_rows, indices, best, sizes, budget)
        for indices, best in zip(ranks, fitted, strict=True)
    ]
    return Assignment(
        rows=tuple(tuple(tuple(row) for row in rank) for rank in rows),
        tokens=tuple(tuple(sum(sizes[index] for index in row) for row in rank) for rank in rows),
        budget=budget,
    )


def _spread(order: Sequence[int], sizes: Sequence[int], num_bins: int) -> list[list[int]]:
    """Longest processing time first: each of `order` (longest first) to the bin with the fewest
    tokens.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    if num_bins == 1:
        bins[0] = list(order)
        return bins
    heap = [(0, number) for number in range(num_bins)]
    for index in order:
        load, number = heap[0]
        bins[number].append(index)
        heapq.heapreplace(heap, (load + sizes[index], number))
    return bins


def _best_fit(order: Sequence[int], sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Best fit decreasing. `open_rows[r]` stacks the rows with r free slots and bit r of `free`
    says whether there are any, so the tightest row that still fits is the lowest set bit at or
    above the length.
    """
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}
    free = 0
    for index in order:
        size = sizes[index]
        fitting = free >> size
        if fitting:
            space = size + (fitting & -fitting).bit_length() - 1
            stack = open_rows[space]
            row = stack.pop()
            if not stack:
                free ^= 1 << space
            rows[row].append(index)
        else:
            space, row = budget, len(rows)
            rows.append([index])
        space -= size
        if space:
            open_rows.setdefault(space, []).append(row)
            free |= 1 << space
    return rows


def _exactly(
    num_rows: int, order: Sequence[int], best: list[list[int]], sizes: Sequence[int], budget: int
) -> list[list[int]]:
    """`num_rows` rows for one rank, fullest first; filler rows (empty) only with fewer sequences
    than rows.
    """
    rows = _spread(order, sizes, num_rows)
    if max((sum(sizes[index] for index in row) for row in rows), default=0) > budget:
        rows = _split(best, num_rows, sizes)
    return sorted(rows, key=lambda row: -sum(sizes[index] for index in row))


def _split(rows: list[list[int]], num_rows: int, sizes: Sequence[int]) -> list[list[int]]:
    """Halves the fullest rows that hold more than one sequence until there are `num_rows`."""
    heap = [
        (-sum(sizes[index] for index in row), number)
        for number, row in enumerate(rows)
        if len(row) > 1
    ]
    heapq.heapify(heap)
    rows = [list(row) for row in rows]
    while len(rows) < num_rows and heap:
        _, number = heapq.heappop(heap)
        halves = _spread(rows[number], sizes, 2)
        rows[number] = halves[0]
        rows.append(halves[1])
        for place in (number, len(rows) - 1):
            if len(rows[place]) > 1:
                heapq.heappush(heap, (-sum(sizes[index] for index in rows[place]), place))
    rows.extend([] for _ in range(num_rows - len(rows)))
    return rows
