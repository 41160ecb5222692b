"""What the generator measures: decode steps, transfers, and the catalog's metrics."""

import contextlib
from collections.abc import Callable, Iterator
from time import monotonic

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pipelinerl_common.generator_api import LoadResponse
from pipelinerl_common.metrics import GENERATOR, Metrics
from pipelinerl_common.telemetry import memory_bytes


class StepClock:
    """Sums what an engine reports after every step; `now` is in seconds."""

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
        """Counts a step that sampled `num_tokens`; the other numbers are those after it."""
        now = self._integrate()
        self._num_preemptions += num_preempted
        if self._follows and num_tokens:
            self._num_steps += 1
            self._step_s += now - self._stepped_at
            self._num_tokens += num_tokens
            self._num_prefilled += num_prefilled
        # The time of a step without a token, a prefill for example, belongs to the next one.
        if num_tokens or not self._follows:
            self._stepped_at = now
        self._num_running, self._num_waiting = num_running, num_waiting
        if self._kv_usage is not None and kv_usage is not None:
            self._kv_usage = kv_usage
        self._follows = num_running > 0

    def interrupted(self) -> None:
        """Decoding paused since the last step, so the next one is not timed."""
        self._follows = False

    def emptied(self) -> None:
        """The engine is empty although no step has reported it: what ran was cancelled."""
        self._integrate()
        self._num_running = self._num_waiting = 0
        self._kv_usage = None if self._kv_usage is None else 0.0
        self._follows = False

    def load(self) -> LoadResponse:
        self._integrate()
        return LoadResponse(
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
        """Integrates up to now, and returns it: nothing has changed since the last step."""
        now = self._now()
        seconds, self._integrated_to = now - self._integrated_to, now
        self._running_s += self._num_running * seconds
        self._kv_usage_s += (self._kv_usage or 0.0) * seconds
        return now


class TransferClock:
    """Divides the time of one transfer; made when the worker is ready for the first bytes."""

    def __init__(self) -> None:
        self._start = self._last = monotonic()
        self._load_s = 0.0

    def arrived(self) -> None:
        """Tensors have arrived, perhaps the last ones."""
        self._last = monotonic()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        start = monotonic()
        yield
        self._load_s += monotonic() - start

    def seconds(self) -> dict[str, float]:
        """The fields of Received besides the checksum."""
        return {"transfer_s": self._last - self._start, "load_s": self._load_s}


class GeneratorMetrics:
    """The metrics of one generator; `role` is that of its process."""

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
        self._load: Callable[[], LoadResponse] = StepClock().load

    def watch(self, load: Callable[[], LoadResponse]) -> None:
        """Reads the engine's load whenever the metrics are read."""
        self._load = load
        self.metrics.gauge("sequences_waiting").read(lambda: float(load().num_waiting))
        self.metrics.gauge("kv_cache_usage_ratio").read(lambda: load().kv_usage)

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        load = self._load()
        self._preemptions.reach(load.preemptions_total)
        self._steps.reach(load.steps_total)
        self._step_seconds.reach(load.step_seconds_total)
        return self.metrics.exposition() + generate_latest(_VLLM)


class _Vllm(Collector):
    """vLLM's own metrics, which it registers with the client library; empty for another engine."""

    def collect(self) -> Iterator[Metric]:
        return (family for family in REGISTRY.collect() if family.name.startswith("vllm:"))


_VLLM = CollectorRegistry(auto_describe=False)
_VLLM.register(_Vllm())
