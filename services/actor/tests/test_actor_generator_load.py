"""The sums of an engine's steps, by hand."""

import pytest

from pipelinerl_actor.generator.metrics import StepClock


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_steps_that_follow_one_another_are_timed_and_all_time_is_integrated() -> None:
    now = Clock()
    clock = StepClock(kv_tokens=1600, now=now)
    now.seconds += 5  # idle
    clock.stepped(
        num_running=2, num_waiting=1, num_tokens=2, kv_usage=0.5, num_prefilled=30
    )  # its start is unknown
    now.seconds += 0.25
    assert clock.load().running_seconds_total == pytest.approx(0.5)  # looking changes nothing
    now.seconds += 0.25
    clock.stepped(
        num_running=3, num_waiting=0, num_tokens=3, kv_usage=0.6, num_prefilled=10, num_preempted=1
    )
    now.seconds += 1
    clock.stepped(num_running=0, num_waiting=0, num_tokens=3, kv_usage=0.0)
    now.seconds += 9  # idle again
    load = clock.load()
    assert (load.num_running, load.num_waiting, load.kv_usage, load.kv_tokens) == (0, 0, 0.0, 1600)
    assert (
        load.preemptions_total,
        load.steps_total,
        load.step_tokens_total,
        load.prefill_tokens_total,
    ) == (1, 2, 6, 10)
    assert load.step_seconds_total == pytest.approx(1.5)
    assert load.running_seconds_total == pytest.approx(2 * 0.5 + 3 * 1)
    assert load.kv_usage_seconds_total == pytest.approx(0.5 * 0.5 + 0.6 * 1)


def test_a_step_after_a_pause_is_not_timed_but_what_ran_is_integrated() -> None:
    now = Clock()
    clock = StepClock(now=now)
    clock.stepped(num_running=1, num_waiting=0, num_tokens=1)
    clock.interrupted()
    now.seconds += 3
    clock.stepped(num_running=1, num_waiting=0, num_tokens=1)
    assert clock.load().steps_total == 0
    assert clock.load().running_seconds_total == pytest.approx(3)
    assert clock.load().kv_usage is None


def test_cancelled_sequences_are_gone_although_no_step_tells() -> None:
    now = Clock()
    clock = StepClock(kv_tokens=16, now=now)
    clock.stepped(num_running=1, num_waiting=2, num_tokens=1, kv_usage=1.0)
    now.seconds += 2
    clock.emptied()
    now.seconds += 50
    load = clock.load()
    assert (load.num_running, load.num_waiting, load.kv_usage) == (0, 0, 0.0)
    assert (load.running_seconds_total, load.kv_usage_seconds_total) == (2, 2)
