"""Packing: every sequence once, rows within the budget, ranks equal; and the targets on
heavy-tailed lengths.
"""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl_preprocessor.packing import Assignment, pack


def heavy_tailed(num: int, budget: int, seed: int) -> np.ndarray:
    """Lognormal with sigma 1 around a twelfth of the budget, so that a few sequences nearly fill a
    row.
    """
    lengths = np.random.default_rng(seed).lognormal(np.log(budget / 12), 1.0, num)
    return np.clip(lengths, 8, budget).astype(np.int64)


def indices(assignment: Assignment) -> list[int]:
    return sorted(index for rank in assignment.rows for row in rank for index in row)


@settings(max_examples=400, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 64), max_size=60),
    num_ranks=st.integers(1, 5),
)
def test_every_sequence_is_in_one_row_that_it_fits(lengths: list[int], num_ranks: int) -> None:
    assignment = pack(lengths, 64, num_ranks)
    assert indices(assignment) == list(range(len(lengths)))
    assert len(assignment.rows) == num_ranks
    assert len({len(rank) for rank in assignment.rows}) == 1
    for rank, rows in enumerate(assignment.rows):
        for number, row in enumerate(rows):
            used = sum(lengths[index] for index in row)
            assert (
                used == assignment.tokens[rank][number] <= assignment.num_slots(rank, number) <= 64
            )
            assert assignment.num_slots(rank, number) % 8 == 0
    if len(lengths) >= 2 * num_ranks * assignment.num_micro_batches:
        assert all(row for rank in assignment.rows for row in rank), (
            "a filler row though there are sequences enough"
        )
    assert pack(lengths, 64, num_ranks) == assignment


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 64), min_size=1, max_size=60), num_ranks=st.integers(1, 5))
def test_ranks_differ_by_no_more_than_one_sequence(lengths: list[int], num_ranks: int) -> None:
    per_rank = [sum(tokens) for tokens in pack(lengths, 64, num_ranks).tokens]
    assert max(per_rank) - min(per_rank) <= max(lengths)


def test_a_worked_example() -> None:
    assignment = pack([5, 3, 4], 8, 2)
    assert assignment.rows == (((0,),), ((2, 1),))
    assert assignment.tokens == ((5,), (7,))
    assert assignment.fill == 12 / 16
    assert assignment.imbalance == 2 / 7


def test_best_fit_needs_fewer_rows_than_arrival_order() -> None:
    # In arrival order first fit needs three rows of 10: [4, 4], [6], [6]; two suffice.
    assert pack([4, 4, 6, 6], 10, 1).tokens == ((10, 10),)


def test_a_rank_short_of_rows_splits_and_only_then_fills() -> None:
    # Rank 0 has one sequence that fills a row, rank 1 the others; both need as many rows as the
    # neediest.
    assignment = pack([10, 6, 6], 10, 2)
    assert [len(rank) for rank in assignment.rows] == [2, 2]
    assert sorted(map(len, assignment.rows[0])) in ([0, 1], [1, 1])
    assert indices(assignment) == [0, 1, 2]


def test_no_sequences_give_one_filler_row_per_rank() -> None:
    assignment = pack([], 64, 3)
    assert assignment.rows == (((),), ((),), ((),))
    assert assignment.num_slots(0, 0) == 8
    assert assignment.imbalance == 0


@pytest.mark.parametrize(("lengths", "match"), [([65], "65"), ([3, 0], "0 tokens"), ([-1], "-1")])
def test_lengths_that_cannot_be_packed_are_refused(lengths: list[int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        pack(lengths, 64, 1)


@pytest.mark.parametrize(
    ("num", "budget", "num_ranks"),
    [(1024, 12000, 8), (256, 4096, 2), (8192, 20000, 64), (512, 4096, 1)],
)
@pytest.mark.parametrize("seed", range(3))
def test_heavy_tails_fill_97_percent_and_balance_within_2_percent(
    num: int, budget: int, num_ranks: int, seed: int
) -> None:
    assignment = pack(heavy_tailed(num, budget, seed), budget, num_ranks)
    assert assignment.fill >= 0.97
    assert assignment.imbalance <= 0.02


def test_a_million_samples_a_minute_are_assigned() -> None:
    lengths = heavy_tailed(20000, 12000, 0)
    best = min(_seconds(lengths) for _ in range(3))
    assert len(lengths) / best * 60 >= 1e6


def _seconds(lengths: np.ndarray) -> float:
    start = time.process_time()
    pack(lengths, 12000, 8)
    return time.process_time() - start
