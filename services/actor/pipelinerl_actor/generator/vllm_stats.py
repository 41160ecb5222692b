"""What vLLM's scheduler tells after every step, for a StepClock. Imports vLLM."""

from typing import Any

from vllm.v1.metrics.loggers import PrometheusStatLogger

from pipelinerl_actor.generator.load import StepClock


class StepStats(PrometheusStatLogger):  # type: ignore[misc] # vLLM ships no types
    """vLLM's own Prometheus metrics, which pass through at /metrics, and the clock beside them.

    vLLM makes it, so the clock is its class's: `StepStats.feeding(clock)` is a class for one engine.
    """

    clock: StepClock

    @classmethod
    def feeding(cls, clock: StepClock) -> type["StepStats"]:
        return type("EngineStepStats", (cls,), {"clock": clock})

    def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
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
