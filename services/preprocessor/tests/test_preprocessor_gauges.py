"""Depth and age of every stage on a clock of the test's own, and the time during which the policy
admits nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

from pipelinerl_common.metrics import Metrics
from pipelinerl_common.metrics.catalog import STAGES
from pipelinerl_common.stream.stream import Stream, StreamDepth
from pipelinerl_preprocessor.admission_service import ClosedTime
from pipelinerl_preprocessor.journal import JournalWriter
from pipelinerl_preprocessor.ledger import Ledger
from pipelinerl_preprocessor.live import LiveLedger, PublishGate, RingBuffer
from pipelinerl_preprocessor.metrics import Depths, PreprocessorCounters
from pipelinerl_staleness.areal import Areal, ArealSettings
from pipelinerl_staleness.policy import Policy
from pipelinerl_staleness.slack import Slack, SlackSettings

B = 2


class Bucket:
    """A journal that is not asked for anything here."""

    async def put(self, key: str, value: bytes) -> None: ...
    async def delete(self, key: str) -> None: ...
    async def entries(self) -> dict[str, bytes]:
        return {}


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def live_ledger(policy: Policy, clock: Callable[[], float]) -> tuple[LiveLedger, Metrics]:
    metrics = Metrics("preprocessor", "test")
    ledger = Ledger(policy, lease_s=1000, max_attempts=3, now=clock)
    journal, gate = JournalWriter(Bucket(), ledger), PublishGate(ledger, 10.0, clock)
    live = LiveLedger(
        ledger, journal, RingBuffer(100), gate, PreprocessorCounters(metrics), now=clock
    )
    ledger.restore("start", 0, None)
    ledger.publish(0)
    return live, metrics


def by_stage(metrics: Metrics, name: str) -> list[float]:
    values = metrics.values()
    return [values[f"{name}{{stage={stage}}}"] for stage in STAGES]


def test_a_group_is_in_one_stage_at_a_time_and_its_age_begins_anew_in_each() -> None:
    clock = Clock()
    live, metrics = live_ledger(Areal(ArealSettings(eta=2), B), clock)
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
        live, metrics = live_ledger(policy, Clock())
        Depths(live.ledger, live.loads, metrics, live.now)
        values = metrics.values()
        assert values["outstanding_limit_groups"] == policy.max_outstanding()
        assert values.get("staleness_bound_steps") == bound


async def test_what_has_not_been_fetched_yet_counts_for_the_stream() -> None:
    live, metrics = live_ledger(Areal(ArealSettings(eta=2), B), Clock())
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
    live, metrics = live_ledger(Areal(ArealSettings(eta=2), B), clock)
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
        "after the end nobody could be let in"
    )
