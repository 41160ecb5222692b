"""What the actors tell of their generators: the newest of each, and sums over all of them."""

from dataclasses import dataclass, field

from pipelinerl.v1.admission_pb2 import GeneratorLoad
from pipelinerl_staleness.policy import EngineLoad

_FRESH_S = 15.0
"""A generator of which nothing was heard for so long counts for nothing."""
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


@dataclass(slots=True)
class _Heard:
    load: GeneratorLoad
    at: float


@dataclass(slots=True)
class EngineLoads:
    """Sums grow also over restarts of generators: only what is new of each report is added."""

    _heard: dict[tuple[str, str], _Heard] = field(default_factory=dict)
    _sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TOTALS, 0.0))
    _preemptions_observed: float = 0.0

    def heard(self, actor_id: str, load: GeneratorLoad, now: float) -> None:
        """A first report of a generator only sets where its totals begin, as does one after its
        restart.
        """
        key = (actor_id, load.generator)
        before = self._heard.pop(key, None)
        if before is not None and all(
            getattr(load, name) >= getattr(before.load, name) for name in TOTALS
        ):
            for name in TOTALS:
                self._sums[name] += getattr(load, name) - getattr(before.load, name)
        self._heard[key] = _Heard(load, now)
        while len(self._heard) > _MAX_GENERATORS:
            del self._heard[next(iter(self._heard))]

    def observation(self, now: float, seconds: float) -> EngineLoad:
        """For the policy, `seconds` after the one before."""
        preemptions = self.num_preemptions
        new, self._preemptions_observed = preemptions - self._preemptions_observed, preemptions
        return EngineLoad(
            kv_usage=self.kv_usage(now),
            num_waiting=int(self.num_waiting(now) or 0),
            num_preemptions=int(new),
            seconds=seconds,
        )

    def values(self, now: float) -> list[float | None]:
        """For the event log: generators, KV tokens of all and of a block, KV use of the fullest,
        sequences that decode and that wait, then the sums in the order of TOTALS. Empty when
        nothing is known.
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
        """Of the fullest generator; None where nobody tells."""
        return max(
            (load.kv_usage for load in self._fresh(now) if load.HasField("kv_usage")), default=None
        )

    def num_waiting(self, now: float) -> float | None:
        """Sequences that wait in all engines; None where nobody tells."""
        fresh = self._fresh(now)
        return float(sum(load.num_waiting for load in fresh)) if fresh else None

    @property
    def num_preemptions(self) -> float:
        """Of all generators since this process started."""
        return self._sums["preemptions_total"]

    def _fresh(self, now: float) -> list[GeneratorLoad]:
        return [heard.load for heard in self._heard.values() if now - heard.at <= _FRESH_S]
