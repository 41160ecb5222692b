"""Counters, the load of the generators, depth and age of every stage on a clock of the test's own,
and the time during which the policy admits no group.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

from preprocessor_fakes import live_ledger

from pipelinerl_common.metrics import Metrics
from pipelinerl_common.metrics.catalog import DROP_REASONS, STAGES
from pipelinerl_common.metrics.catalog import LAYERS as STALE_LAYERS
from pipelinerl_common.stream.stream import Stream, StreamDepth
from pipelinerl_common.telemetry import memory_bytes
from pipelinerl_preprocessor.admission_service import ClosedTime
from pipelinerl_preprocessor.groups import DropReason, Group, make_group_id
from pipelinerl_preprocessor.metrics import LAYERS, Depths, PreprocessorCounters
from pipelinerl_staleness.areal import Areal, ArealSettings
from pipelinerl_staleness.slack import Slack, SlackSettings


def test_reasons_from_outside_are_words_and_bounded() -> None:
    metrics = Metrics("preprocessor", "test")
    counters = PreprocessorCounters(metrics)
    counters.dropped("verifier_timeout", 5, 0)
    counters.dropped("stale", 16, 2)
    counters.wasted("cancelled", 3)
    for strange in ("", "Bad Reason", "x" * 50, *(f"reason_{number}" for number in range(100))):
        counters.dropped(strange, 1, 0)
    values = metrics.values()
    assert values["groups_dropped_total{reason=verifier_timeout}"] == 1
    assert values["tokens_dropped_total{reason=verifier_timeout}"] == 5
    assert values["samples_dropped_total{reason=stale}"] == 2
    assert values["tokens_dropped_total{reason=cancelled}"] == 3
    assert values["groups_dropped_total{reason=other}"] >= 3
    groups = [value for name, value in values.items() if name.startswith("groups_dropped_total")]
    assert sum(groups) == 105
    assert len(groups) <= 65


def test_drops_of_the_staleness_policy_are_counted_by_its_layers() -> None:
    metrics = Metrics("preprocessor", "test")
    counters = PreprocessorCounters(metrics)
    counters.dropped("cancelled", 0, 0)
    counters.wasted("cancelled", 7)
    counters.dropped("stale", 16, 2)
    counters.dropped("expired", 9, 0)
    stale = {name: value for name, value in metrics.values().items() if name.startswith("stale_")}
    assert stale == {
        "stale_groups_total{layer=running}": 1,
        "stale_groups_total{layer=assembly}": 1,
        "stale_tokens_total{layer=running}": 7,
        "stale_tokens_total{layer=assembly}": 16,
    }


def test_trained_groups_count_by_the_age_of_their_oldest_token() -> None:
    metrics = Metrics("preprocessor", "test")
    groups = [Group(make_group_id(0, number), number, number) for number in range(3)]
    groups[0].first_versions, groups[1].first_versions = (4, 2), (5, 5)
    PreprocessorCounters(metrics).trained(5, groups)
    values = metrics.values()
    assert values["groups_trained_total"] == 3
    assert (values["staleness_steps_count"], values["staleness_steps_sum"]) == (2, 3)


def test_the_catalog_knows_every_reason_and_layer() -> None:
    assert set(DROP_REASONS) == set(DropReason)
    assert set(STALE_LAYERS) == set(LAYERS.values())


def test_resident_memory_is_told() -> None:
    assert memory_bytes() > 1e6


B = 2


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def by_stage(metrics: Metrics, name: str) -> list[float]:
    values = metrics.values()
    return [values[f"{name}{{stage={stage}}}"] for stage in STAGES]


def test_a_group_is_in_one_stage_at_a_time_and_its_age_begins_anew_in_each() -> None:
    clock = Clock()
    live = live_ledger(Areal(ArealSettings(eta=2), B), clock)
    metrics = live.counters.metrics
    Depths(live.ledger, live.loads, metrics, live.now)
    ledger = live.ledger
    leases = ledger.grant("actor", "session", 5, clock())
    assert by_stage(metrics, "queue_groups") == [5, 0, 0, 0, 0]
    clock.now += 10
    for lease in leases[1:]:
        ledger.started("actor", lease.lease_id, 0)
    clock.now += 5
    assert by_stage(metrics, "queue_groups") == [1, 4, 0, 0, 0]
    assert by_stage(metrics, "queue_oldest_seconds") == [15, 5, 0, 0, 0]
    for lease in leases[2:]:
        ledger.arrive(lease.group_id)
    clock.now += 3
    for lease in leases[3:]:
        ledger.ready(lease.group_id, [0], [0])
    clock.now += 2
    assert by_stage(metrics, "queue_groups") == [1, 1, 1, 2, 0]
    assert by_stage(metrics, "queue_oldest_seconds") == [20, 10, 5, 2, 0]
    assert len(ledger.take().groups) == B
    clock.now += 1
    assert by_stage(metrics, "queue_groups") == [1, 1, 1, 0, 2]
    assert by_stage(metrics, "queue_oldest_seconds") == [21, 11, 6, 0, 1]
    ledger.hand_back("actor", leases[1].lease_id)
    assert by_stage(metrics, "queue_groups") == [2, 0, 1, 0, 2], "it waits to be leased again"


def test_limits_are_those_of_the_policy_and_a_policy_without_a_promise_has_no_bound() -> None:
    for policy, bound in (
        (Slack(SlackSettings(eta=3), B), 3.0),
        (Areal(ArealSettings(eta=2), B), None),
    ):
        live = live_ledger(policy, Clock())
        metrics = live.counters.metrics
        Depths(live.ledger, live.loads, metrics, live.now)
        values = metrics.values()
        assert values["outstanding_limit_groups"] == policy.max_outstanding()
        assert values.get("staleness_bound_steps") == bound


async def test_what_has_not_been_fetched_yet_counts_for_the_stream() -> None:
    live = live_ledger(Areal(ArealSettings(eta=2), B), Clock())
    metrics = live.counters.metrics
    depths = Depths(live.ledger, live.loads, metrics, live.now)

    async def depth(timeout_s: float) -> StreamDepth:
        return StreamDepth(num_messages=7, num_bytes=7000, max_bytes=10_000)

    stream = SimpleNamespace(depth=depth, counters={"retries": 3, "set_aside_job": 1})
    await depths.update(cast(Stream, stream), 1.0, num_fetched=3, num_forced=0)
    values = metrics.values()
    assert values["queue_groups{stage=stream}"] == 4
    assert (values["stream_messages"], values["stream_bytes"], values["stream_limit_bytes"]) == (
        7,
        7000,
        10_000,
    )
    assert values["stream_events_total{event=retries}"] == 3
    assert values["stream_set_aside_total{reason=job}"] == 1


def test_closed_time_is_counted_once_however_many_actors_wait() -> None:
    clock = Clock()
    live = live_ledger(Areal(ArealSettings(eta=2), B), clock)
    metrics = live.counters.metrics
    seconds = metrics.counter("admission_closed_seconds_total")
    closed = ClosedTime(live, seconds)
    with closed.refusing():
        clock.now += 2
        with closed.refusing():
            clock.now += 3
            closed.count()
            assert metrics.values()["admission_closed_seconds_total"] == 5, "while they still wait"
        clock.now += 1
    clock.now += 100
    assert metrics.values()["admission_closed_seconds_total"] == 6
    with closed.refusing():
        clock.now += 4
    assert metrics.values()["admission_closed_seconds_total"] == 10
    live.ledger.state.done = True
    with closed.refusing():
        clock.now += 50
    assert metrics.values()["admission_closed_seconds_total"] == 10, (
        "after the end no group can be granted"
    )
