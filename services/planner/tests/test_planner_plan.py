"""The throughput model against the paper's published numbers, and by hand."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelinerl_common.errors import SettingsError
from pipelinerl_planner.lengths import empirical, lognormal, parse_lengths, uniform
from pipelinerl_planner.throughput import (
    Grid,
    PlanWorkload,
    Throughput,
    chosen,
    conventional,
    conventional_steps,
    frontier,
    in_flight,
    lag,
    least_batch_size,
    max_lag,
)
from pipelinerl_planner.utilization import FittedCurve, MeasuredCurve, read_utilization

CASE = PlanWorkload(128, 128, uniform(1, 2048), 4.92, FittedCurve())
"""The paper's case study, appendix A.4."""

# The paper's numbers, each within 1 %.


def test_case_study_conventional() -> None:
    found = conventional(CASE, conventional_steps(133))
    assert (found.r_gen, found.r_train, found.r) == pytest.approx((18.3, 26.02, 10.7), rel=0.01)


def test_case_study_in_flight() -> None:
    found = in_flight(CASE, 192, 44)
    assert (found.r_gen, found.r_train, found.r) == pytest.approx((16.9, 17.08, 16.9), rel=0.01)
    assert max_lag(CASE, 192, 44) == pytest.approx(133, rel=0.01)
    assert found.r / conventional(CASE, conventional_steps(133)).r == pytest.approx(1.57, rel=0.01)


def test_case_study_search_finds_the_papers_pair_as_the_greatest_speedup() -> None:
    points = frontier(CASE, Grid())
    best = chosen(points, None)
    assert (best.batch_per_gpu, best.num_generating) == (192, 44)
    assert (best.max_lag, best.speedup) == pytest.approx((133, 1.57), rel=0.01)
    within = frontier(CASE, Grid(max_lag=133))
    assert chosen(within, 133) == best


def test_case_study_with_a_larger_batch_has_a_sixteenth_of_the_lag() -> None:
    larger = PlanWorkload(128, 2048, CASE.lengths, CASE.tau, CASE.utilization)
    in_progress = 192 * 44
    assert lag(larger, in_progress) == pytest.approx(8.25, rel=0.01)
    assert lag(CASE, in_progress) == pytest.approx(133, rel=0.01)
    (same,) = [point for point in frontier(larger, Grid(max_lag=9)) if point.max_lag == 9]
    assert same.lag == pytest.approx(lag(larger, same.in_progress))
    assert 8 < same.lag <= 9
    assert max_lag(larger, 192, 44) == 9  # 8.2, rounded up
    assert max_lag(larger, 184, 44) == 8
    assert (
        least_batch_size(larger, in_progress, 9) <= 2048 < least_batch_size(larger, in_progress, 8)
    )


def test_built_in_curve_is_linear_at_first_and_saturates() -> None:
    curve = FittedCurve()
    assert curve([64, 128, 192]) == pytest.approx([0.137, 0.274, 0.384], rel=0.03)
    assert float(curve(0)) == 0
    rising = curve(np.arange(1, 5000))
    assert np.all(np.diff(rising) > 0)
    assert np.all(np.diff(rising, 2) < 1e-12)
    assert rising[-1] == pytest.approx(0.62, rel=0.01)


# By hand.


def test_throughputs_by_hand() -> None:
    """Lengths 1 and 3: two sequences run for one step, then one for two. With U(h) = h/4 a step
    takes 4 flashes.
    """
    curve = MeasuredCurve((4.0,), (1.0,), "hand")
    load = PlanWorkload(1, 2, empirical([1, 3], "hand"), 2.0, curve)
    assert load.lengths.survival.tolist() == [1, 0.5, 0.5]
    assert conventional(load, 1) == Throughput(
        4 / 12, 0.5, 0.2
    )  # 4 tokens in 12 flashes; 1 / (3 + 2)
    two = PlanWorkload(2, 2, load.lengths, 2.0, curve)
    assert in_flight(two, 2, 1) == Throughput(0.5, 0.5, 0.5)
    assert max_lag(two, 2, 1) == 2  # ceil(2 * 1 * 3 / (2 * 2)) = ceil(1.5)
    assert max_lag(two, 4, 1) == 3  # exactly 3


def test_frontier_agrees_with_trying_every_pair() -> None:
    load = PlanWorkload(12, 24, uniform(1, 64), 3.0, FittedCurve())
    points = frontier(load, Grid(most_per_gpu=32))
    batches = [*range(1, 9), 16, 24, 32]
    tried = [(max_lag(load, h, i), in_flight(load, h, i).r) for h in batches for i in range(1, 12)]
    for point in points:
        assert point.throughput.r == pytest.approx(
            max(r for found, r in tried if found <= point.max_lag)
        )
        assert point.throughput == pytest.approx(
            in_flight(load, point.batch_per_gpu, point.num_generating)
        )
        assert point.speedup == pytest.approx(
            point.throughput.r / conventional(load, point.max_lag + 1).r
        )
    assert points[-1].throughput.r == pytest.approx(max(r for _, r in tried))
    assert sorted({point.max_lag for point in points}) == [point.max_lag for point in points]


@pytest.mark.parametrize(
    ("distribution", "mean", "longest"),
    [
        (uniform(1, 100), 50.5, 100),
        (uniform(5, 5), 5, 5),
        (uniform(10, 20), 15, 20),
        (empirical([2, 2, 8], "three"), 4, 8),
        (lognormal(1000, 0.5, 100_000), 1000 * math.exp(0.125) + 0.5, None),
        (lognormal(1000, 1.0, 500), None, 500),
    ],
)
def test_means_and_longest(distribution: Any, mean: float | None, longest: int | None) -> None:
    assert distribution.survival[0] == 1
    assert np.all(np.diff(distribution.survival) <= 1e-9)
    assert distribution.survival[-1] > 0
    if mean is not None:
        assert distribution.mean == pytest.approx(mean, rel=1e-4)
    if longest is not None:
        assert distribution.longest == longest


def test_lognormal_median() -> None:
    survival = lognormal(700, 0.9, 8192).survival
    assert survival[700] == pytest.approx(0.5, abs=1e-3)
    assert survival[round(700 * math.exp(0.9))] == pytest.approx(0.1587, abs=1e-3)


def test_trace_as_lengths(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("response_tokens\n1\n3\n1\n3\n")
    assert parse_lengths(str(tmp_path / "t.csv"), 2).survival.tolist() == [1, 0.5, 0.5]


def test_measured_curve_is_linear_between_its_points_and_ends_with_the_last(tmp_path: Path) -> None:
    file = tmp_path / "u.json"
    points = [{"h": h, "tokens_per_second": 10.0 * h, "utilization": h / 256} for h in (1, 64, 256)]
    file.write_text(json.dumps({"peak_tokens_per_second": 2560.0, "points": points}))
    curve = read_utilization(file)
    assert curve([0, 0.5, 128, 1000]) == pytest.approx([0, 0.5 / 256, 0.5, 1])


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "not JSON"),
        ("[]", "has no list `points`"),
        ('{"points": [{"h": 1}]}', r"points[0]: utilization=None"),
        ('{"points": [{"h": 0, "utilization": 0.1}]}', r"points[0]: h=0 must be a number above 0"),
        ('{"points": [{"h": 2, "utilization": 0.1}, {"h": 1, "utilization": 0.1}]}', "h must rise"),
        ('{"points": [{"h": 1, "utilization": 1.5}]}', "utilization=1.5 is above 1"),
        (
            '{"points": [{"h": 1, "utilization": 0.5}], "peak_tokens_per_second": "x"}',
            "peak_tokens_per_second='x'",
        ),
    ],
)
def test_bad_utilization_files_are_refused(document: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "u.json").write_text(document)
    with pytest.raises(SettingsError) as caught:
        read_utilization(tmp_path / "u.json")
    assert message in str(caught.value)
