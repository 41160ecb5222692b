import argparse

from bench import packing
from bench.packing import first_fit


def test_first_fit_closes_a_row_when_the_next_sample_does_not_fit() -> None:
    # Row of 10: 6+3 | 5+5 | 9 | 2+1, rows in turn, 4 samples a rank: rank 0 has 6+3 and 9, then 2;
    # rank 1 has 5+5 and 1.
    ranks = first_fit([6, 3, 5, 5, 9, 2, 1], num_ranks=2, num_slots=10)
    assert [rank.rows for rank in ranks] == [[9, 9], [10, 3]]
    assert [rank.num_samples for rank in ranks] == [3, 4]


def test_first_fit_closes_a_row_when_its_rank_has_its_share() -> None:
    ranks = first_fit([1, 1, 1, 1], num_ranks=2, num_slots=10)
    assert [(rank.rows, rank.num_samples) for rank in ranks] == [([2], 2), ([2], 2)]


def test_packing_bench_beats_first_fit() -> None:
    args = argparse.Namespace(
        quick=True,
        seed=1,
        samples=512,
        ranks=2,
        slots=12000,
        median_tokens=900,
        max_tokens=8192,
        rounds=9,
    )
    values = packing.bench(args).values
    assert {
        "fill",
        "imbalance",
        "samples_per_minute",
        "baseline_fill",
        "baseline_imbalance",
    } <= values.keys()
    fill, slot_fill, baseline_fill = values["fill"], values["slot_fill"], values["baseline_fill"]
    assert isinstance(fill, float)
    assert isinstance(slot_fill, float)
    assert isinstance(baseline_fill, float)
    assert 0.5 < baseline_fill < fill < slot_fill <= 1
    assert values["num_samples"] == 1024
    imbalance, baseline_imbalance = values["imbalance"], values["baseline_imbalance"]
    assert isinstance(imbalance, float)
    assert isinstance(baseline_imbalance, float)
    assert 0 <= imbalance < baseline_imbalance < 1
