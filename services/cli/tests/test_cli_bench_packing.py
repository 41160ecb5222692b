from pipelinerl_cli.bench.first_fit import first_fit


def test_first_fit_closes_a_row_when_the_next_sample_does_not_fit() -> None:
    # Row of 10: 6+3 | 5+5 | 9 | 2+1, rows in turn, 4 samples a rank: rank 0 has 6+3 and 9, then 2; rank 1 has 5+5 and 1.
    ranks = first_fit([6, 3, 5, 5, 9, 2, 1], num_ranks=2, num_slots=10)
    assert [rank.rows for rank in ranks] == [[9, 9], [10, 3]]
    assert [rank.num_samples for rank in ranks] == [3, 4]


def test_first_fit_closes_a_row_when_its_rank_has_its_share() -> None:
    ranks = first_fit([1, 1, 1, 1], num_ranks=2, num_slots=10)
    assert [(rank.rows, rank.num_samples) for rank in ranks] == [([2], 2), ([2], 2)]
