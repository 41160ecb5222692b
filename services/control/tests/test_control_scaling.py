"""The chosen number of actors, on systems of known rates, and the period behind it."""

import math
from itertools import pairwise
from typing import Any

import pytest
from control_fakes import spec_of, system
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from pipelinerl_control.balance import Balance, Counts, Period
from pipelinerl_control.scaling import ScalingChoice, choose, look, num_actors


def test_nothing_is_chosen_before_the_period_is_over() -> None:
    assert choose(spec_of(1, 8, 2), 2, system(2, 1.0, 9.0, steps=9)) is None


def test_the_rule_adds_two_and_takes_five_and_changes_nothing_in_the_band() -> None:
    spec = spec_of(1, 40, 20)
    assert choose(spec, 20, system(20, 1.0, 100.0)) == 22
    assert choose(spec, 20, system(20, 1.0, 5.0)) == 15
    assert choose(spec, 20, system(20, 1.0, 18.6)) == 20


def test_gpus_are_rounded_up_to_whole_actors() -> None:
    """8 GPUs each: 2 GPUs more are one actor, 5 less are one."""
    spec = spec_of(1, 40, 20, gpus=8)
    assert choose(spec, 20, system(20, 1.0, 100.0)) == 21
    assert choose(spec, 20, system(20, 1.0, 5.0)) == 19


def test_a_stride_ends_at_the_balance() -> None:
    """Trainers for 3 actors. Of 5, two go and not four; of 3, none is added: 4 would make 3/4,
    which is below 0.9.
    """
    spec = spec_of(1, 8, 5)
    assert choose(spec, 5, system(5, 1.0, 3.0)) == 3
    assert choose(spec, 3, system(3, 1.0, 3.0)) == 3


def test_while_both_sides_wait_nothing_is_taken_away() -> None:
    """Generation could make 10 groups/s and the trainers take 4, but the staleness policy lets them
    have 2.
    """
    assert choose(spec_of(1, 8, 4), 4, Balance(0, 10, 4, 2.0, 10.0, 4.0)) == 4


def test_a_job_that_generates_nothing_is_left_alone() -> None:
    assert choose(spec_of(1, 8, 2), 2, Balance(0, 10, 2, 0.0, 0.0, 0.0)) == 2


@examples(deadline=None)
@given(
    bounds=st.lists(st.integers(1, 60), min_size=3, max_size=3).map(sorted),
    gpus=st.sampled_from([0, 1, 8]),
    rates=st.tuples(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6)).map(sorted),
    idle=st.booleans(),
)
def test_every_choice_is_within_the_bounds(
    bounds: list[int], gpus: int, rates: list[float], idle: bool
) -> None:
    least, before, most = bounds
    balance = Balance(
        0, 10, before, rates[0], rates[1], math.inf if idle else max(rates[0], rates[2])
    )
    chosen = choose(spec_of(least, most, before, gpus), before, balance)
    assert chosen is not None
    assert least <= chosen <= most


@examples(deadline=None)
@given(
    bounds=st.lists(st.integers(1, 60), min_size=3, max_size=3).map(sorted),
    gpus=st.sampled_from([0, 1, 8]),
    per_actor=st.floats(0.1, 10),
    r_train=st.floats(0.05, 600),
    strides=st.tuples(st.integers(1, 64), st.integers(1, 64)),
    band=st.tuples(st.floats(0.3, 0.99), st.floats(0.3, 1.0)).filter(
        lambda band: band[0] < band[1]
    ),
)
def test_a_system_of_constant_rates_comes_to_rest_and_never_goes_down_after_it_went_up(
    bounds: list[int],
    gpus: int,
    per_actor: float,
    r_train: float,
    strides: tuple[int, int],
    band: tuple[float, float],
) -> None:
    least, count, most = bounds
    settings = {
        "takeAwayGpus": strides[0],
        "addGpus": strides[1],
        "lowRatio": band[0],
        "highRatio": band[1],
    }
    spec = spec_of(least, most, count, gpus, **settings)
    counts = [count]
    for _ in range(64):
        chosen = choose(spec, counts[-1], system(counts[-1], per_actor, r_train))
        assert chosen is not None
        counts.append(chosen)
    assert counts[-1] == counts[-2], "at most 59 actors to go"
    changes = [b - a for a, b in pairwise(counts) if a != b]
    rises = [change > 0 for change in changes]
    assert rises == sorted(rises), "down to the balance first, then up to it, and never again down"


# the schedules

HYBRID: dict[str, Any] = {"schedule": "hybrid", "exploreSteps": 50}


@pytest.mark.parametrize(
    ("settings", "choice", "expected"),
    [
        ({}, None, 2),
        (HYBRID, None, 8),
        ({}, ScalingChoice(actors=5, start=2, step=10), 5),
        (HYBRID, ScalingChoice(actors=5, start=2, step=50), 5),
        ({}, ScalingChoice(actors=5, start=3, step=10), 2),
        (HYBRID, ScalingChoice(actors=5, start=3, step=50), 2),
        ({}, ScalingChoice(actors=9, start=2, step=10), 8),
        ({"enabled": False}, ScalingChoice(actors=5, start=2, step=10), 2),
        ({**HYBRID, "enabled": False}, None, 2),
    ],
    ids=[
        "the spec's",
        "all while exploring",
        "the choice",
        "the choice after exploring",
        "a user has scaled",
        "a user has scaled after exploring",
        "the most was lowered",
        "off",
        "hybrid, but off",
    ],
)
def test_how_many_actors_there_should_be(
    settings: dict[str, Any], choice: ScalingChoice | None, expected: int
) -> None:
    assert num_actors(spec_of(1, 8, 2, **settings), choice) == expected


def test_a_hybrid_schedule_goes_down_to_its_share_after_exploring_and_then_follows_the_ratio() -> (
    None
):
    """8 actors and one trainer rank: 0.3 of 9 places are 3 actors, which could make 3 of the 100
    groups/s.
    """
    spec = spec_of(1, 8, 2, **HYBRID)
    assert look(spec, None, 49, system(8, 1.0, 2.0, begin=0, steps=49)) is None
    assert look(spec, None, None, None) is None
    down = look(spec, None, 51, None)
    assert down is not None
    assert down.choice == ScalingChoice(actors=3, start=2, step=51, ratio=None)
    assert down.why == (
        "actors 8 -> 3: the 50 steps in which every actor generates are over (step 51); from here "
        "on it is "
        "splitShare=0.3 of 9 places, trainers included"
    )
    up = look(spec, down.choice, 61, system(3, 1.0, 100.0, begin=51))
    assert up is not None
    assert up.choice == ScalingChoice(actors=5, start=2, step=61, ratio=1.0)
    assert up.why.startswith(
        "actors 3 -> 5: trainers wait for samples (ratio 1.000, above highRatio=0.95)"
    )


def test_going_back_to_a_checkpoint_does_not_bring_exploring_back() -> None:
    spec, choice = spec_of(1, 8, 2, **HYBRID), ScalingChoice(actors=3, start=2, step=51)
    assert look(spec, choice, 10, None) is None
    assert num_actors(spec, choice) == 3


def test_what_a_hybrid_schedule_goes_down_to_is_whole_actors_within_the_bounds() -> None:
    """4 actors of 8 GPUs and 1 trainer rank: 0.3 of 33 GPUs are 10, of which one actor has 8 and
    two 16.
    """
    down = look(spec_of(1, 4, 1, gpus=8, **HYBRID), None, 50, None)
    least = look(spec_of(2, 4, 3, gpus=8, **HYBRID), None, 50, None)
    same = look(spec_of(1, 4, 1, gpus=8, **HYBRID, splitShare=0.99), None, 50, None)
    assert [each.choice.actors for each in (down, least, same) if each] == [1, 2, 4]
    assert same is not None
    assert same.why == ""


def test_what_is_said_of_a_number_that_goes_down() -> None:
    down = look(spec_of(1, 8, 4), None, 10, system(4, 1.0, 2.0))
    assert down is not None
    assert down.why == (
        "actors 4 -> 2: generators wait for the trainers (ratio 0.500, below lowRatio=0.9); in "
        "steps 0 to 10 2 groups per "
        "second were taken of the 4 that generation can make, without waiting it would be 2"
    )


def test_a_balance_of_another_number_of_actors_or_of_steps_looked_at_before_says_nothing() -> None:
    spec, choice = spec_of(1, 8, 2), ScalingChoice(actors=4, start=2, step=15)
    assert look(spec, choice, 20, system(3, 1.0, 100.0, begin=10)) is None
    assert look(spec, choice, 20, system(4, 1.0, 100.0, begin=10)) is None
    assert look(spec, choice, 25, system(4, 1.0, 100.0, begin=15)) is not None


# the period


def counts(at: float, step: int, actors: str = "ab") -> Counts:
    return Counts(
        at,
        step,
        frozenset(actors),
        ("t", "p"),
        taken=8.0 * step,
        late=0,
        waiting=0,
        closed_s=0,
        trainer_wait_s=0,
    )


def steps_of(period: Period) -> tuple[int, int] | None:
    return None if period.balance is None else (period.balance.begin_step, period.balance.step)


def test_a_period_grows_until_it_is_looked_at_or_a_process_comes_or_goes() -> None:
    period, seen = Period(), []
    readings = [
        counts(1, 3),
        counts(2, 5),
        counts(3, 9),
        counts(4, 10, "abc"),
        counts(5, 12, "abc"),
    ]
    for each in readings:
        period.take(each, None)
        seen.append(steps_of(period))
    assert seen == [None, (3, 5), (3, 9), None, (10, 12)]
    period.restart()
    assert steps_of(period) is None
    period.take(counts(6, 13, "abc"), 12)
    assert steps_of(period) == (12, 13)
    period.take(None, 12)
    assert steps_of(period) is None


def test_trainers_that_pass_the_last_look_again_begin_a_period_there() -> None:
    """Otherwise the steps before it would be in every period from then on, and nothing would ever
    be chosen again.
    """
    period = Period()
    for at, step in enumerate((5, 8, 11, 14)):
        period.take(counts(at, step), 10)
    assert steps_of(period) == (11, 14)
