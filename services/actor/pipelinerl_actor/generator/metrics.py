"""How full an engine is and what its decode steps cost, summed step by step.

Sums instead of samples, because whoever asks twice gets exact means over the time between: a mean
number of running sequences is the difference of `running_seconds` over that of the time.

What the generator counts, by the catalog's names.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pipelinerl_common.metrics import GENERATOR, Metrics
from pipelinerl_common.telemetry import memory_bytes


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Example: 12 sequences decode, 3 wait for blocks, 40 % of 500192 tokens of KV cache are in
    use.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float | None = None
    """Share of the KV blocks in use, 0 to 1; None for an engine without blocks."""
    kv_tokens: int | None = None
    """Tokens that the KV cache holds; None for an engine without blocks."""
    kv_block_tokens: int | None = None
    """Tokens of one KV block; None for an engine without blocks."""
    preemptions_total: int = 0
    steps_total: int = 0
    """Decode steps that were timed: those that followed another one at once."""
    step_seconds_total: float = 0.0
    """What they took."""
    step_tokens_total: int = 0
    """Sampled in them."""
    prefill_tokens_total: int = 0
    """Prompt tokens computed in them; what the prefix cache had is not among them."""
    running_seconds_total: float = 0.0
    """Sequences that ran, integrated over time."""
    kv_usage_seconds_total: float = 0.0
    """`kv_usage`, integrated over time."""


class StepClock:
    """Adds up what an engine tells after every step. `now` in seconds."""

    def __init__(self, kv_tokens: int | None = None, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self._integrated_to = self._stepped_at = now()
        self._follows = False
        self._num_running = self._num_waiting = 0
        self._kv_usage = None if kv_tokens is None else 0.0
        self.kv_block_tokens: int | None = None
        self.kv_tokens = kv_tokens
        self._num_preemptions = self._num_steps = self._num_tokens = self._num_prefilled = 0
        self._step_s = self._running_s = self._kv_usage_s = 0.0

    def stepped(
        self,
        *,
        num_running: int,
        num_waiting: int,
        num_tokens: int,
        kv_usage: float | None = None,
        num_prefilled: int = 0,
        num_preempted: int = 0,
    ) -> None:
        """A step has ended, and this is how the engine is left. `num_tokens` were sampled in it."""
        now = self._integrate()
        self._num_preemptions += num_preempted
        if self._follows and num_tokens:
            self._num_steps += 1
            self._step_s += now - self._stepped_at
            self._num_tokens += num_tokens
            self._num_prefilled += num_prefilled
        if num_tokens or not self._follows:  # what no token came of belongs to the next step
            self._stepped_at = now
        self._num_running, self._num_waiting = num_running, num_waiting
        if self._kv_usage is not None and kv_usage is not None:
            self._kv_usage = kv_usage
        self._follows = num_running > 0

    def interrupted(self) -> None:
        """Decoding stood still since the last step, so the next one is not timed."""
        self._follows = False

    def emptied(self) -> None:
        """Nothing is in the engine any more, though no step has told so: what ran was cancelled."""
        self._integrate()
        self._num_running = self._num_waiting = 0
        self._kv_usage = None if self._kv_usage is None else 0.0
        self._follows = False

    def load(self) -> EngineLoad:
        self._integrate()
        return EngineLoad(
            num_running=self._num_running,
            num_waiting=self._num_waiting,
            kv_usage=self._kv_usage,
            kv_tokens=self.kv_tokens,
            kv_block_tokens=self.kv_block_tokens,
            preemptions_total=self._num_preemptions,
            steps_total=self._num_steps,
            step_seconds_total=self._step_s,
            step_tokens_total=self._num_tokens,
            prefill_tokens_total=self._num_prefilled,
            running_seconds_total=self._running_s,
            kv_usage_seconds_total=self._kv_usage_s,
        )

    def _integrate(self) -> float:
        """Up to this moment, which is returned: nothing has changed since the last step."""
        now = self._now()
        seconds, self._integrated_to = now - self._integrated_to, now
        self._running_s += self._num_running * seconds
        self._kv_usage_s += (self._kv_usage or 0.0) * seconds
        return now


class GeneratorMetrics:
    """Of one generator object; `role` is that of its process."""

    def __init__(self, job: str = "", role: str = GENERATOR) -> None:
        metrics = self.metrics = Metrics(role, job)
        self.tokens = metrics.counter("sampled_tokens_total")
        self.prompt_tokens = metrics.counter("prompt_tokens_total")
        self.scored_tokens = metrics.counter("scored_tokens_total")
        self.sequences = metrics.counter("sequences_finished_total")
        self.cancelled = metrics.counter("sequences_cancelled_total")
        self.refused = metrics.counter("requests_refused_total")
        self.running = metrics.gauge("sequences_running")
        self.limit = metrics.gauge("sequences_limit")
        self.version = metrics.gauge("weight_version")
        self.epoch = metrics.gauge("weight_epoch")
        self.updates = metrics.counter("weight_updates_applied_total")
        self.update_errors = metrics.counter("weight_update_errors_total")
        self.pause = metrics.histogram("weight_pause_seconds")
        self.transfer = metrics.histogram("weight_transfer_seconds")
        metrics.gauge("memory_bytes").read(memory_bytes)
        self._preemptions = metrics.counter("preemptions_total")
        self._steps = metrics.counter("decode_steps_total")
        self._step_seconds = metrics.counter("decode_step_seconds_total")
        self._load: Callable[[], EngineLoad] = EngineLoad

    def watch(self, load: Callable[[], EngineLoad]) -> None:
        """Asks the engine for its load whenever somebody wants to know."""
        self._load = load
        self.metrics.gauge("sequences_waiting").read(lambda: float(load().num_waiting))
        self.metrics.gauge("kv_cache_usage_ratio").read(lambda: load().kv_usage)

    def exposition(self) -> bytes:
        """For Prometheus."""
        load = self._load()
        self._preemptions.reach(load.preemptions_total)
        self._steps.reach(load.steps_total)
        self._step_seconds.reach(load.step_seconds_total)
        return self.metrics.exposition() + generate_latest(_VLLM)


class _Vllm(Collector):
    """vLLM's own metrics, which it registers with the client library; none for another engine."""

    def collect(self) -> Iterator[Metric]:
        return (family for family in REGISTRY.collect() if family.name.startswith("vllm:"))


_VLLM = CollectorRegistry(auto_describe=False)
_VLLM.register(_Vllm())


class TransferClock:
    """What the time of one transfer went into."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._load_s = 0.0

    def ready(self) -> None:
        """The worker is about to wait for the first bucket."""
        self._start = self._last = time.monotonic()

    def bucket_arrived(self) -> None:
        self._last = time.monotonic()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        start = time.monotonic()
        yield
        self._load_s += time.monotonic() - start

    def seconds(self) -> dict[str, float]:
        """The fields of Received beside the checksum."""
        return {"transfer_s": self._last - self._start, "load_s": self._load_s}
