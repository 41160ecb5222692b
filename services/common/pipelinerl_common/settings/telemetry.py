"""`spec.telemetry`: destinations of a job's metrics and traces beside Prometheus."""

from typing import Annotated, Literal

from pydantic import Field

from pipelinerl_common.settings.base import Settings

_Name = Annotated[str, Field(min_length=1, max_length=128)]


class WandbSettings(Settings):
    """Weights & Biases. Its key comes from the trainer's environment (WANDB_API_KEY) or from
    ~/.netrc, never from the job file.
    """

    project: _Name = "pipelinerl"
    """Project in which the run appears."""
    entity: _Name | None = None
    """User or team that owns the run. Unset: the key's default."""
    group: _Name | None = None
    """Runs that belong together, for example seeds of one experiment."""
    tags: Annotated[tuple[_Name, ...], Field(max_length=32)] = ()
    """Tags of the run."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes below the run's folder only; `wandb sync` sends it later."""


class TensorBoardSettings(Settings):
    """TensorBoard event files in `tensorboard/` below the run's folder: `tensorboard --logdir
    runs`.
    """

    flush_seconds: Annotated[float, Field(gt=0, le=600)] = 10.0
    """Longest time in seconds that a value waits in memory before it is written."""


class SinkSettings(Settings):
    """Sinks, each of which receives one row of metrics per optimizer step. A slow or failing sink
    loses rows, which are counted; training continues.
    """

    wandb: WandbSettings | None = None
    """Weights & Biases; `{}` enables it. It needs `pip install 'pipelinerl[wandb]'` where rank 0 of
    the trainer runs.
    """
    tensorboard: TensorBoardSettings | None = None
    """TensorBoard; `{}` enables it. It needs `pip install 'pipelinerl[tensorboard]'` there."""


class TracingSettings(Settings):
    """OpenTelemetry traces: of groups from their lease to their optimizer step, of steps, and of
    weight updates.
    """

    endpoint: Annotated[str, Field(pattern=r"^https?://[^/\s]+$")]
    """URL at which an OTLP collector accepts gRPC, for example http://otel-collector:4317."""
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the groups that are traced. Steps and weight updates are few and always traced."""


class TelemetrySettings(Settings):
    sinks: SinkSettings = SinkSettings()
    """Weights & Biases and TensorBoard."""
    tracing: TracingSettings | None = None
    """OpenTelemetry traces. Unset disables tracing without any cost."""
    engine_metrics: bool = True
    """Adds vLLM's own metrics (`vllm:*`) to the generators' /metrics, at some cost per decode step.
    """
