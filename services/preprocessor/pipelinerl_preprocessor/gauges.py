"""How full everything is: read when somebody wants to know."""

from collections.abc import Iterable
from functools import partial

from pipelinerl_common.metrics import Metrics
from pipelinerl_common.stream import Stream
from pipelinerl_common.telemetry import memory_bytes
from pipelinerl_preprocessor.groups import Group, GroupState
from pipelinerl_preprocessor.live import LiveLedger

_STATES = {
    "stream": GroupState.ARRIVED,
    "ready": GroupState.READY,
    "packed": GroupState.TAKEN,
}


class Depths:
    """Depth and oldest age of each stage. A stage's groups are those between its beginning and the
    next one's.
    """

    def __init__(self, live: LiveLedger, metrics: Metrics) -> None:
        self._live = live
        self._undelivered = 0.0
        depth, age = metrics.gauge("queue_groups"), metrics.gauge("queue_oldest_seconds")
        for stage in ("admitted", "running", *_STATES):
            depth.read(partial(self.depth, stage), stage=stage)
            age.read(partial(self.oldest_seconds, stage), stage=stage)
        ledger, policy = live.ledger, live.ledger.policy
        metrics.gauge("outstanding_limit_groups").set(float(policy.max_outstanding()))
        bound = policy.bound()
        metrics.gauge("staleness_bound_steps").set(None if bound is None else float(bound))
        metrics.gauge("served_version").read(lambda: float(ledger.state.served_version))
        metrics.gauge("memory_bytes").read(memory_bytes)
        metrics.gauge("engine_kv_usage_ratio").read(lambda: live.loads.kv_usage(live.now()))
        metrics.gauge("engine_sequences_waiting").read(lambda: live.loads.num_waiting(live.now()))
        self._preemptions = metrics.counter("engine_preemptions_total")
        self._messages, self._bytes = (
            metrics.gauge("stream_messages"),
            metrics.gauge("stream_bytes"),
        )
        self._limit = metrics.gauge("stream_limit_bytes")
        self._events, self._set_aside = (
            metrics.counter("stream_events_total"),
            metrics.counter("stream_set_aside_total"),
        )
        self._forced = metrics.counter("publishes_forced_total")

    def depth(self, stage: str) -> float:
        """Groups in `stage`; of the stream also those that have not been fetched from it."""
        count = sum(1 for _ in self._groups(stage))
        return count + (self._undelivered if stage == "stream" else 0.0)

    def oldest_seconds(self, stage: str) -> float:
        now = self._live.now()
        return max((now - group.since for group in self._groups(stage)), default=0.0)

    def _groups(self, stage: str) -> Iterable[Group]:
        groups = self._live.ledger.groups
        if stage in _STATES:
            return groups.within(_STATES[stage])
        leased = groups.within(GroupState.LEASED)
        if stage == "running":
            return (group for group in leased if group.started_version >= 0)
        return [
            *groups.within(GroupState.WAITING),
            *(group for group in leased if group.started_version < 0),
        ]

    async def look_at(self, stream: Stream, timeout_s: float) -> None:
        """Asks the stream's server how much it holds. Raises Unavailable."""
        self._forced.reach(self._live.gate.num_forced)
        self._preemptions.reach(self._live.loads.num_preemptions)
        for name, count in stream.counters.items():
            if name.startswith("set_aside_"):
                self._set_aside.reach(count, reason=name.removeprefix("set_aside_"))
            else:
                self._events.reach(count, event=name)
        depth = await stream.depth(timeout_s)
        self._messages.set(float(depth.num_messages))
        self._bytes.set(float(depth.num_bytes))
        self._limit.set(float(depth.max_bytes))
        fetched = sum(received.num_messages for received in self._live.received.values())
        self._undelivered = float(max(0, depth.num_messages - fetched))
