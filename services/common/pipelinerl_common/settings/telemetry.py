"""Where a job's numbers go beside Prometheus: `spec.telemetry`."""

from typing import Annotated, Literal

from pydantic import Field

from pipelinerl_common.settings.base import Settings

_Name = Annotated[str, Field(min_length=1, max_length=128)]


class WandbSettings(Settings):
    """Weights & Biases. Its key comes from the environment of the trainer (WANDB_API_KEY) or from
    ~/.netrc, never from here.
    """

    project: _Name = "pipelinerl"
    """Where the run appears."""
    entity: _Name | None = None
    """User or team; None for the key's own."""
    group: _Name | None = None
    """Runs that belong together, for example seeds of one experiment."""
    tags: Annotated[tuple[_Name, ...], Field(max_length=32)] = ()
    """Words to find the run by."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes below the run's folder only; `wandb sync` sends it later."""


class TensorBoardSettings(Settings):
    """Event files in `tensorboard/` below the run's folder: `tensorboard --logdir runs`."""

    flush_seconds: Annotated[float, Field(gt=0, le=600)] = 10.0
    """Longest time that a value waits in memory before it is in the file."""


class SinkSettings(Settings):
    """Each gets a row per optimizer step. A sink that is slow or fails loses rows, which are
    counted; training goes on.
    """

    wandb: WandbSettings | None = None
    """`wandb: {}` turns it on; needs `pip install 'pipelinerl[wandb]'` where rank 0 of the trainer
    runs.
    """
    tensorboard: TensorBoardSettings | None = None
    """`tensorboard: {}` turns it on; needs `pip install 'pipelinerl[tensorboard]'` there."""


class TracingSettings(Settings):
    """Traces by OpenTelemetry: of groups from their grant to their step, of steps, and of weight
    updates.
    """

    endpoint: Annotated[str, Field(pattern=r"^https?://[^/\s]+$")]
    """Where an OTLP collector listens for gRPC, for example http://otel-collector:4317."""
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the groups that are traced. Steps and weight updates, of which there are few, always
    are.
    """


class TelemetrySettings(Settings):
    sinks: SinkSettings = SinkSettings()
    """For people who are used to Weights & Biases or TensorBoard."""
    tracing: TracingSettings | None = None
    """Off without it, and then nothing of it runs."""
    engine_metrics: bool = True
    """vLLM's own metrics (`vllm:*`) at the generators' /metrics too; they cost the generators some
    time at each decode step.
    """
