"""Where a job's numbers go beside Prometheus: `spec.telemetry`."""

from typing import Annotated, Literal

from pydantic import Field

from pipelinerl_common.settings.base import Settings

_Name = Annotated[str, Field(min_length=1, max_length=128)]


class WandbSettings(Settings):
    """Weights & Biases. Its key comes from the environment of the trainer (WANDB_API_KEY) or from ~/.netrc, never from here."""

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
    """Each gets a row per optimizer step. A sink that is slow or fails loses rows, which are counted; training goes on."""

    wandb: WandbSettings | None = None
    """`wandb: {}` turns it on; needs `pip install 'pipelinerl[wandb]'` where rank 0 of the trainer runs."""
    tensorboard: TensorBoardSettings | None = None
    """`tensorboard: {}` turns it on; needs `pip install 'pipelinerl[tensorboard]'` there."""


class TelemetrySettings(Settings):
    sinks: SinkSettings = SinkSettings()
    """For people who are used to Weights & Biases or TensorBoard."""
