"""What the generator counts, for Prometheus. Every generator object has a registry of its own."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class GeneratorMetrics:
    """All names begin with `pipelinerl_generator_`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def name(text: str) -> str:
            return f"pipelinerl_generator_{text}"

        registry = self.registry
        self.tokens = Counter(name("tokens"), "Sampled tokens.", registry=registry)
        self.prompt_tokens = Counter(name("prompt_tokens"), "Tokens of prompts.", registry=registry)
        self.scored_tokens = Counter(name("scored_tokens"), "Tokens that were scored.", registry=registry)
        self.sequences = Counter(name("sequences"), "Finished sequences.", ["finish_reason"], registry=registry)
        self.cancelled = Counter(name("cancelled"), "Sequences whose client went away.", registry=registry)
        self.refused = Counter(name("refused"), "Requests that were turned away.", ["reason"], registry=registry)
        self.running = Gauge(name("running"), "Sequences in the engine, waiting ones included.", registry=registry)
        self.version = Gauge(name("weight_version"), "Version of the weights; -1 before the first update.", registry=registry)
        self.epoch = Gauge(name("weight_epoch"), "Epoch of the weight-transfer group; 0 for none.", registry=registry)
        self.updates = Counter(name("weight_updates"), "Updates that were applied.", ["mode"], registry=registry)
        self.update_failures = Counter(name("weight_update_failures"), "Updates that were not.", ["reason"], registry=registry)
        self.pause = Histogram(
            name("weight_pause_seconds"), "Time without decoding.", ["mode"], buckets=_SECONDS, registry=registry
        )
        self.transfer = Histogram(
            name("weight_transfer_seconds"),
            "From being ready to having it all.",
            ["mode"],
            buckets=_SECONDS,
            registry=registry,
        )
