"""Exponential backoff: doubling, cap, jitter, reset."""

import pytest

from pipelinerl_common.backoff import Backoff


def test_delays_double_up_to_the_cap() -> None:
    backoff = Backoff(0.5, 3.0, jitter=0)
    assert [backoff.next_delay() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert backoff.num_failures == 5


def test_reset_starts_over() -> None:
    backoff = Backoff(0.5, 3.0, jitter=0)
    backoff.next_delay()
    backoff.next_delay()
    backoff.reset()
    assert backoff.num_failures == 0
    assert backoff.next_delay() == 0.5


def test_jitter_only_shortens_delays_and_by_at_most_its_share() -> None:
    delays = [Backoff(1.0, 8.0, jitter=0.25).next_delay() for _ in range(200)]
    assert min(delays) >= 0.75
    assert max(delays) <= 1.0
    assert len(set(delays)) > 1


def test_thousands_of_failures_stay_at_the_cap() -> None:
    backoff = Backoff(0.2, 5.0, jitter=0, num_failures=5000)
    assert backoff.next_delay() == 5.0


async def test_sleep_waits_for_the_next_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(delay_s: float) -> None:
        slept.append(delay_s)

    monkeypatch.setattr("pipelinerl_common.backoff.asyncio.sleep", sleep)
    backoff = Backoff(0.1, 1.0, jitter=0)
    await backoff.sleep()
    await backoff.sleep()
    assert slept == [0.1, 0.2]
