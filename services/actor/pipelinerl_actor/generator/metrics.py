"""What the generator counts, by the catalog's names."""

from collections.abc import Callable, Iterator

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pipelinerl_actor.generator.load import Load
from pipelinerl_common.metrics import GENERATOR, Metrics
from pipelinerl_common.telemetry import memory_bytes


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
        self._load: Callable[[], Load] = Load

    def watch(self, load: Callable[[], Load]) -> None:
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
