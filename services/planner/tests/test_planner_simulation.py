"""The books of a simulated run, whatever the policy."""

import time
from dataclasses import replace
from typing import Any

import pytest

from pipelinerl_planner.cluster import SimulatedCluster
from pipelinerl_planner.lengths import LognormalLengths, TraceLengths
from pipelinerl_planner.outcome import SimulationOutcome
from pipelinerl_planner.presets import PRESETS
from pipelinerl_planner.simulation import SimulationRun, simulate
from pipelinerl_staleness.policy import Policy
from pipelinerl_staleness.registry import POLICIES, make_policy, parse_policy_settings

CLUSTER = SimulatedCluster(kv_tokens=60_000)


def policy_of(name: str, batch: int = 4, **parameters: Any) -> Policy:
    return make_policy(parse_policy_settings(name, parameters), batch)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_books_of_every_policy(name: str) -> None:
    done: list[int] = []
    outcome = simulate(policy_of(name), SimulationRun(CLUSTER, LognormalLengths(3), 6), done.append)
    again = simulate(policy_of(name), SimulationRun(CLUSTER, LognormalLengths(3), 6))
    assert outcome == again
    assert done == [1, 2, 3, 4, 5, 6]
    assert outcome.num_steps == 6
    assert (
        sum(outcome.trained_lengths.values())
        == sum(outcome.trajectories_by_staleness.values())
        == 6 * 4 * 8
    )
    assert sum(outcome.tokens_by_staleness.values()) == outcome.trained_tokens
    assert sum(outcome.batches_by_max_staleness.values()) == 6
    assert outcome.effective_tokens_per_second == pytest.approx(
        outcome.total_tokens_per_second * (1 - outcome.waste)
    )
    assert outcome.waste == pytest.approx(outcome.waste_l2 + outcome.waste_l3)
    bound = policy_of(name).bound()
    assert bound is None or outcome.max_staleness <= bound
    assert min(outcome.tokens_by_staleness) >= 0
    assert 0 <= outcome.trainer_idle_seconds < outcome.wall_seconds


def test_synchronous_run_by_hand() -> None:
    """Two groups of one trajectory per step. Step: prefill 2 x 10 tokens, 5 decode steps of 10 ms,
    10 tokens trained in 0.1 s, publish 1 s (not after the last step).
    """
    cluster = SimulatedCluster(1, 1600, 8, 0.01, 0.0, 1000.0, 1.0, 100.0, 0.5)
    lengths = TraceLengths(((10, (5,)),))
    outcome = simulate(policy_of("areal", batch=2, eta=0), SimulationRun(cluster, lengths, 3))
    step = 0.02 + 0.05 + 0.1 + 0.5
    assert outcome.wall_seconds == pytest.approx(3 * step + 2 * 1.0)
    assert outcome.trained_tokens == 30
    assert outcome.trainer_idle_seconds == pytest.approx(3 * 0.07)
    assert outcome.tokens_by_staleness == {0: 30}


def test_lag_by_hand() -> None:
    """One group of one trajectory per step, two outstanding: the second one decodes 20 steps of 10
    ms from the start, while the first is trained at 0.03 .. 0.13 and version 1 arrives at 0.23: it
    has then 12 tokens, and 8 follow.
    """
    cluster = SimulatedCluster(1, 16000, 8, 0.01, 0.0, 1e9, 0.1, 30.0, 0.0)
    lengths = TraceLengths(((1, (3,)), (1, (20,)), (1, (1000,))))
    outcome = simulate(
        policy_of("nemo_weight_fifo", batch=1, eta=1), SimulationRun(cluster, lengths, 2)
    )
    assert outcome.tokens_by_staleness == {0: 3 + 7, 1: 13}
    assert outcome.wall_seconds == pytest.approx(0.03 + 0.1 + 0.1 + 0.07 + 20 / 30, abs=1e-6)


def test_a_run_ends_with_its_data() -> None:
    lengths = TraceLengths(((10, (50, 60)),) * 7, repeat=False)
    outcome = simulate(policy_of("slack", batch=2), SimulationRun(CLUSTER, lengths, 100))
    assert outcome.num_steps == 3


def test_a_stuck_policy_is_reported() -> None:
    class Never(type(policy_of("areal"))):  # type: ignore[misc]
        def may_admit(self) -> bool:
            return False

    settings = parse_policy_settings("areal", {})
    with pytest.raises(RuntimeError, match="step 0 can never start: 0 of 4 groups ready"):
        simulate(Never(settings, 4), SimulationRun(CLUSTER, LognormalLengths(0), 2))


def test_publish_keeps_the_cache_of_some_policies() -> None:
    run = SimulationRun(replace(CLUSTER, kv_tokens=500_000), LognormalLengths(1), 6)
    assert simulate(policy_of("skyrl", max_staleness_steps=1), run).num_refilled_tokens == 0
    assert simulate(policy_of("areal", eta=1), run).num_refilled_tokens > 0


def test_drop_enrichment_by_hand() -> None:
    """Ten of 100 trajectories are long; 6 of the long and 4 of the others are dropped: 60 % over 10
    %.
    """
    outcome = SimulationOutcome(trained_lengths={16: 86, 1600: 4}, dropped_lengths={16: 4, 1600: 6})
    assert outcome.drop_rate == pytest.approx(0.1)
    assert outcome.drop_enrichment == pytest.approx(6.0)
    assert SimulationOutcome(trained_lengths={16: 1}).drop_enrichment is None


def test_one_article_run_is_fast() -> None:
    preset = PRESETS["article"]
    started = time.process_time()
    for name in ("areal", "slack", "verl_drop"):
        simulate(
            policy_of(name, batch=16), SimulationRun(preset.cluster, preset.lengths(0, 16, 8), 10)
        )
    assert time.process_time() - started < 3
