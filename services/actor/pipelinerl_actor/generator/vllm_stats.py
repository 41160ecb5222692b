"""What vLLM's scheduler tells after every step, for a StepClock. Imports vLLM."""

from typing import Any

from vllm.v1.metrics.loggers import PrometheusStatLogger

from pipelinerl_actor.generator.load import StepClock


class StepStats(PrometheusStatLogger):  # type: ignore[misc] # vLLM ships no types
    """Feeds the clock, and vLLM's own Prometheus metrics when they are wanted at /metrics: they
    cost time at each step.

    vLLM makes it, so both are its class's: `StepStats.feeding(clock, own_metrics=True)` is a class
    for one engine.
    """

    clock: StepClock
    own_metrics: bool

    @classmethod
    def feeding(cls, clock: StepClock, *, own_metrics: bool) -> type["StepStats"]:
        return type("EngineStepStats", (cls,), {"clock": clock, "own_metrics": own_metrics})

    def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
        if self.own_metrics:
            super().__init__(vllm_config, engine_indexes)

    def log_engine_initialized(self) -> None:
        if self.own_metrics:
            super().log_engine_initialized()

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if self.own_metrics:
            super().record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
        if scheduler_stats is None:
            return
        self.clock.stepped(
            num_running=scheduler_stats.num_running_reqs,
            num_waiting=scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
            kv_usage=scheduler_stats.kv_cache_usage,
            num_tokens=iteration_stats.num_generation_tokens if iteration_stats else 0,
            num_prefilled=iteration_stats.prompt_token_stats.computed if iteration_stats else 0,
            num_preempted=iteration_stats.num_preempted_reqs if iteration_stats else 0,
        )
