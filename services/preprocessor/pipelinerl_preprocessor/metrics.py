"""The preprocessor's metrics: what it counts itself, the load that actors report of their
generators, and the depth of every stage, which is read when it is asked for.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from pipelinerl.v1.admission_pb2 import GeneratorLoad
from pipelinerl_common.metrics import Metrics
from pipelinerl_common.stream import Stream
from pipelinerl_common.telemetry import memory_bytes
from pipelinerl_preprocessor.groups import DropReason, Group, GroupState
from pipelinerl_preprocessor.ledger import Ledger
from pipelinerl_staleness.policy import EngineLoad

LAYERS: Mapping[str, str] = {DropReason.CANCELLED: "running", DropReason.STALE: "assembly"}
"""The layers of the staleness policy beyond admission, by the drop reason of each."""

_REASON = re.compile(r"[a-z][a-z0-9_]{0,39}")


class PreprocessorCounters:
    """Totals since this process started. Some reasons come from actors; one that is not a single
    word is counted as `other`.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.tokens_received = metrics.counter("tokens_received_total")
        self.leases_granted = metrics.counter("leases_granted_total")
        self._groups_trained = metrics.counter("groups_trained_total")
        self._staleness = metrics.histogram("staleness_steps")
        self.sequences_masked = metrics.counter("sequences_masked_total")
        self.sequences_overlong = metrics.counter("sequences_overlong_total")
        self._dropped_groups = metrics.counter("groups_dropped_total")
        self._dropped_samples = metrics.counter("samples_dropped_total")
        self._dropped_tokens = metrics.counter("tokens_dropped_total")
        self._stale_groups = metrics.counter("stale_groups_total")
        self._stale_tokens = metrics.counter("stale_tokens_total")

    def trained(self, step: int, groups: Sequence[Group]) -> None:
        """`groups` were trained in `step`. A group that arrived before a restart has no known
        versions and no staleness.
        """
        self._groups_trained.inc(len(groups))
        for group in groups:
            if group.first_versions:
                self._staleness.observe(max(0, step - min(group.first_versions)))

    def dropped(self, reason: str, num_tokens: int, num_samples: int) -> None:
        """A group ended untrained, having cost `num_tokens` sampled tokens in `num_samples`
        finished trajectories.
        """
        self._dropped_groups.inc(reason=_word(reason))
        self._dropped_samples.inc(num_samples, reason=_word(reason))
        if reason in LAYERS:
            self._stale_groups.inc(layer=LAYERS[reason])
        self.wasted(reason, num_tokens)

    def wasted(self, reason: str, num_tokens: int) -> None:
        """Sampled tokens were discarded; their group is counted elsewhere, or is still active."""
        self._dropped_tokens.inc(num_tokens, reason=_word(reason))
        if reason in LAYERS:
            self._stale_tokens.inc(num_tokens, layer=LAYERS[reason])


def _word(reason: str) -> str:
    return reason if _REASON.fullmatch(reason) else "other"


_FRESH_S = 15.0
"""Age in seconds at which a report no longer counts."""
_MAX_GENERATORS = 16384

TOTALS = (
    "preemptions_total",
    "steps_total",
    "step_seconds_total",
    "step_tokens_total",
    "prefill_tokens_total",
    "running_seconds_total",
    "kv_usage_seconds_total",
    "requested_seconds_total",
    "answered_total",
)
"""Fields of GeneratorLoad that only grow while the generator's process and the actor's live."""


class EngineLoads:
    """The newest load report of each generator, and sums over all of them. Sums also grow over
    restarts of generators: only the increase since a generator's previous report is added.
    """

    def __init__(self) -> None:
        self._reports: dict[tuple[str, str], tuple[GeneratorLoad, float]] = {}
        """Report and time of arrival by actor and generator, the one received last at the end."""
        self._sums = dict.fromkeys(TOTALS, 0.0)
        self._preemptions_observed = 0.0

    def add(self, actor_id: str, load: GeneratorLoad, now: float) -> None:
        """A generator's first report, as the first after its restart, only sets where its totals
        begin.
        """
        key = (actor_id, load.generator)
        before, _ = self._reports.pop(key, (None, 0.0))
        if before is not None and all(
            getattr(load, name) >= getattr(before, name) for name in TOTALS
        ):
            for name in TOTALS:
                self._sums[name] += getattr(load, name) - getattr(before, name)
        self._reports[key] = (load, now)
        while len(self._reports) > _MAX_GENERATORS:
            del self._reports[next(iter(self._reports))]

    def observation(self, now: float, seconds: float) -> EngineLoad:
        """The load for the policy, `seconds` after the previous observation."""
        preemptions = self.num_preemptions
        new, self._preemptions_observed = preemptions - self._preemptions_observed, preemptions
        return EngineLoad(
            kv_usage=self.kv_usage(now),
            num_waiting=int(self.num_waiting(now) or 0),
            num_preemptions=int(new),
            seconds=seconds,
        )

    def values(self, now: float) -> list[float | None]:
        """The load for the event log: generators, KV tokens of all and of a block, KV use of the
        fullest, sequences that decode and that wait, then the sums in the order of TOTALS. Empty
        without a recent report.
        """
        fresh = self._fresh(now)
        if not fresh:
            return []
        usage = self.kv_usage(now)
        return [
            len(fresh),
            sum(load.kv_tokens for load in fresh),
            fresh[-1].kv_block_tokens,
            None if usage is None else round(usage, 6),
            sum(load.num_running for load in fresh),
            sum(load.num_waiting for load in fresh),
            *(round(self._sums[name], 6) for name in TOTALS),
        ]

    def kv_usage(self, now: float) -> float | None:
        """KV use of the fullest generator; None where no generator reports it."""
        return max(
            (load.kv_usage for load in self._fresh(now) if load.HasField("kv_usage")), default=None
        )

    def num_waiting(self, now: float) -> float | None:
        """The number of sequences that wait in all engines; None without a recent report."""
        fresh = self._fresh(now)
        return float(sum(load.num_waiting for load in fresh)) if fresh else None

    @property
    def num_preemptions(self) -> float:
        """Preemptions of all generators since this process started."""
        return self._sums["preemptions_total"]

    def _fresh(self, now: float) -> list[GeneratorLoad]:
        return [load for load, at in self._reports.values() if now - at <= _FRESH_S]


_STATES = {
    "stream": GroupState.ARRIVED,
    "ready": GroupState.READY,
    "packed": GroupState.TAKEN,
}


class Depths:
    """Gauges of the depth and the oldest age of each stage. A stage's groups are those between its
    start and the start of the next one.
    """

    def __init__(
        self, ledger: Ledger, loads: EngineLoads, metrics: Metrics, now: Callable[[], float]
    ) -> None:
        self._ledger = ledger
        self._loads = loads
        self._now = now
        self._undelivered = 0.0
        depth, age = metrics.gauge("queue_groups"), metrics.gauge("queue_oldest_seconds")
        for stage in ("admitted", "running", *_STATES):
            depth.read(partial(self.depth, stage), stage=stage)
            age.read(partial(self.oldest_seconds, stage), stage=stage)
        policy = ledger.policy
        metrics.gauge("outstanding_limit_groups").set(float(policy.max_outstanding()))
        bound = policy.bound()
        metrics.gauge("staleness_bound_steps").set(None if bound is None else float(bound))
        metrics.gauge("served_version").read(lambda: float(ledger.state.served_version))
        metrics.gauge("memory_bytes").read(memory_bytes)
        metrics.gauge("engine_kv_usage_ratio").read(lambda: loads.kv_usage(now()))
        metrics.gauge("engine_sequences_waiting").read(lambda: loads.num_waiting(now()))
        self._preemptions = metrics.counter("engine_preemptions_total")
        self._messages = metrics.gauge("stream_messages")
        self._bytes = metrics.gauge("stream_bytes")
        self._limit = metrics.gauge("stream_limit_bytes")
        self._events = metrics.counter("stream_events_total")
        self._set_aside = metrics.counter("stream_set_aside_total")
        self._forced = metrics.counter("publishes_forced_total")

    def depth(self, stage: str) -> float:
        """The number of groups in `stage`; the stream's includes those not yet fetched from it."""
        count = sum(1 for _ in self._groups(stage))
        return count + (self._undelivered if stage == "stream" else 0.0)

    def oldest_seconds(self, stage: str) -> float:
        now = self._now()
        return max((now - group.since for group in self._groups(stage)), default=0.0)

    def _groups(self, stage: str) -> Iterable[Group]:
        groups = self._ledger.groups
        if stage in _STATES:
            return groups.within(_STATES[stage])
        leased = groups.within(GroupState.LEASED)
        if stage == "running":
            return (group for group in leased if group.started_version >= 0)
        return [
            *groups.within(GroupState.WAITING),
            *(group for group in leased if group.started_version < 0),
        ]

    async def update(
        self, stream: Stream, timeout_s: float, *, num_fetched: int, num_forced: int
    ) -> None:
        """Reads what is not read at scrape time: the stream server's depth, of which this process
        holds `num_fetched` messages, and totals that others keep. Raises Unavailable.
        """
        self._forced.reach(num_forced)
        self._preemptions.reach(self._loads.num_preemptions)
        for name, count in stream.counters.items():
            if name.startswith("set_aside_"):
                self._set_aside.reach(count, reason=name.removeprefix("set_aside_"))
            else:
                self._events.reach(count, event=name)
        depth = await stream.depth(timeout_s)
        self._messages.set(float(depth.num_messages))
        self._bytes.set(float(depth.num_bytes))
        self._limit.set(float(depth.max_bytes))
        self._undelivered = float(max(0, depth.num_messages - num_fetched))
