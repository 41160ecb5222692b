"""What the generator counts, by the catalog's names."""

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
