"""The controllers never leave their bounds, keep still between their thresholds, and settle where
both sides are in balance.
"""

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from pipelinerl_planner.controllers import (
    HybridPhase,
    HybridSchedule,
    HybridSettings,
    HybridState,
    Share,
    ShareRule,
    ShareRuleSettings,
)

NUM_GPUS = st.integers(2, 2000)
RATES = st.floats(0, 1e6)
TRACES = st.lists(st.tuples(st.integers(0, 30), RATES, RATES), max_size=60)


@pytest.mark.parametrize(
    ("num_gpus", "start"), [(2, 1), (3, 1), (30, 10), (128, 42), (192, 64), (1000, 64)]
)
def test_start_is_a_third_but_at_most_64(num_gpus: int, start: int) -> None:
    assert ShareRule(ShareRuleSettings(num_gpus)).initial() == Share(start, 0)


@pytest.mark.parametrize(
    ("r", "expected"),
    [(0.0, 37), (0.899, 37), (0.9, 42), (0.93, 42), (0.95, 42), (0.951, 44), (1.0, 44)],
)
def test_thresholds_and_the_band_between_them(r: float, expected: int) -> None:
    rule = ShareRule(ShareRuleSettings(128))
    assert rule.observe(Share(42, 0), 10, r, 1.0) == Share(expected, 10)


def test_looks_every_ten_steps_only() -> None:
    rule = ShareRule(ShareRuleSettings(128))
    share = rule.initial()
    changes = []
    for step in range(1, 41):
        after = rule.observe(share, step, 1.0, 1.0)
        if after != share:
            changes.append((step, after.num_generating))
        share = after
    assert changes == [(10, 44), (20, 46), (30, 48), (40, 50)]


def test_back_to_a_checkpoint_starts_a_new_period() -> None:
    rule = ShareRule(ShareRuleSettings(128))
    back = rule.observe(Share(42, 100), 95, 1.0, 1.0)
    assert back == Share(42, 95)
    assert rule.observe(back, 104, 1.0, 1.0) == back
    assert rule.observe(back, 105, 1.0, 1.0) == Share(44, 105)


def test_nothing_generated_changes_nothing() -> None:
    assert ShareRule(ShareRuleSettings(128)).observe(Share(42, 0), 10, 0.0, 0.0) == Share(42, 10)


@examples(deadline=None)
@given(NUM_GPUS, TRACES)
def test_rule_never_leaves_its_bounds(num_gpus: int, trace: list[tuple[int, float, float]]) -> None:
    rule = ShareRule(ShareRuleSettings(num_gpus))
    share, step = rule.initial(), 0
    for steps, r, r_gen in trace:
        step += steps
        share = rule.observe(share, step, r, r_gen)
        assert 1 <= share.num_generating <= num_gpus - 1


@examples(deadline=None)
@given(num_gpus=st.integers(16, 1000), speed=st.floats(0.05, 1.0), tau=st.floats(1.0, 10.0))
def test_rule_settles_around_the_balance(num_gpus: int, speed: float, tau: float) -> None:
    """With r_gen = speed * I and r_train = (N - I) / tau the ratio is q where I = N / (1 + tau *
    speed * q). Once reached, the share stays between the places of the two thresholds, give or take
    the move that crossed one.
    """
    settings = ShareRuleSettings(num_gpus)
    rule = ShareRule(settings)
    share, seen = rule.initial(), []
    for look in range(1, 2 * num_gpus):
        r_gen, r_train = speed * share.num_generating, (num_gpus - share.num_generating) / tau
        share = rule.observe(share, 10 * look, min(r_gen, r_train), r_gen)
        seen.append(share.num_generating)
    at_high, at_low = (
        num_gpus / (1 + tau * speed * ratio) for ratio in (settings.high_ratio, settings.low_ratio)
    )
    least, most = min(at_high, at_low - settings.take_away), max(at_low, at_high + settings.add)
    for num_generating in seen[num_gpus:]:
        assert num_generating >= least - 1e-6 or num_generating == settings.least
        assert num_generating <= most + 1e-6 or num_generating == settings.most


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_gpus": 1}, "num_gpus=1 must hold least=1 and least_training=1"),
        ({"num_gpus": 8, "low_ratio": 0.99}, "low_ratio=0.99 and high_ratio=0.95 must rise"),
        ({"num_gpus": 8, "period_steps": 0}, "period_steps=0"),
    ],
)
def test_settings_that_make_no_sense(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShareRuleSettings(**fields)  # type: ignore[arg-type]


def test_hybrid_splits_once_and_then_follows_the_rule() -> None:
    schedule = HybridSchedule(HybridSettings(ShareRuleSettings(128), explore_steps=50))
    state = schedule.initial()
    assert state == HybridState(HybridPhase.EXPLORE, Share(128, 0))
    assert schedule.observe(state, 49, 1.0, 1.0) == state
    state = schedule.observe(state, 50, 1.0, 1.0)
    assert state == HybridState(HybridPhase.SPLIT, Share(38, 50))
    assert schedule.observe(state, 59, 1.0, 1.0) == state
    assert schedule.observe(state, 60, 1.0, 1.0).share == Share(40, 60)
    assert schedule.observe(state, 20, 1.0, 1.0).phase is HybridPhase.SPLIT


def test_hybrid_without_adjustment_keeps_its_share() -> None:
    schedule = HybridSchedule(HybridSettings(ShareRuleSettings(10), explore_steps=0, adjust=False))
    state = schedule.initial()
    assert state == HybridState(HybridPhase.SPLIT, Share(3, 0))
    assert schedule.observe(state, 1000, 1.0, 1.0) == state


@examples(deadline=None)
@given(NUM_GPUS, st.integers(0, 40), st.floats(0.01, 0.99), TRACES)
def test_hybrid_bounds_and_order_of_phases(
    num_gpus: int, explore_steps: int, share: float, trace: list[tuple[int, float, float]]
) -> None:
    schedule = HybridSchedule(HybridSettings(ShareRuleSettings(num_gpus), explore_steps, share))
    state, step = schedule.initial(), 0
    for steps, r, r_gen in trace:
        step += steps
        state = schedule.observe(state, step, r, r_gen)
        assert (state.phase is HybridPhase.EXPLORE) == (step < explore_steps)
        if state.phase is HybridPhase.EXPLORE:
            assert state.share.num_generating == num_gpus
        else:
            assert 1 <= state.share.num_generating <= num_gpus - 1


@pytest.mark.parametrize(
    ("explore_steps", "share", "message"),
    [(-1, 0.3, "explore_steps=-1"), (0, 1.0, "split_share=1.0"), (0, 0.0, "split_share=0")],
)
def test_hybrid_settings_that_make_no_sense(explore_steps: int, share: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HybridSettings(ShareRuleSettings(8), explore_steps, share)
