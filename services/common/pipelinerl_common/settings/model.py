"""`spec.model` and `spec.task`: what is trained, on what."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, model_validator

from pipelinerl_common.settings.base import CLUSTER_ONLY, Settings
from pipelinerl_common.settings.kubernetes import ModelCacheSettings

DOTTED_PATH = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")


def _dotted(value: str) -> str:
    if not DOTTED_PATH.match(value):
        raise ValueError(f"{value!r} is not of the form 'package.module:Name'")
    return value


TaskPath = Annotated[str, AfterValidator(_dotted)]
"""A task's class as `package.module:Name`."""

TaskArgs = Annotated[
    dict[str, JsonValue], BeforeValidator(lambda value: {} if value is None else value)
]
"""Keyword arguments of a task's class; `args:` with nothing behind it means none."""


class AdapterSettings(Settings):
    """Low-rank adapters (LoRA): weights stay as they are, and what is trained is a product of two
    thin matrices beside each.
    """

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Rows of A and columns of B (r): a target's update is B times A."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The update is multiplied by alpha over rank."""
    target_modules: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=256)]],
            Field(min_length=1, max_length=256),
        ]
        | None
    ) = None
    """Linear layers that have an adapter, by their names or the ends of them, such as `q_proj` or
    `layers.0.mlp.up_proj`. Unset: all of the decoder. The head has none.
    """

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @model_validator(mode="before")
    @classmethod
    def _no_dropout(cls, data: Any) -> Any:
        if isinstance(data, dict) and "dropout" in data:
            raise ValueError(
                "dropout is not offered: generators sample without it, and the trained "
                "log-probabilities must be those of the "
                "same distribution; leave it out"
            )
        return data


class ModelSettings(Settings):
    uri: Annotated[str, Field(min_length=1, max_length=512)]
    """Where the model comes from: a local folder in Hugging Face format, `hf://organisation/name`,
    or `tiny://arithmetic` (a character-level model that is made and pre-trained on the spot, for
    trying things out without a GPU).
    """
    revision: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Branch, tag or commit of an `hf://` model."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Element type of the generator's weights and of what is broadcast. Use float32 on a CPU."""
    head_dtype: Literal["model", "float32"] = "model"
    """Element type in which the language model's head computes logits, in generators, reference and
    trainer alike: that of the weights, or float32, which brings the log-probabilities of a bfloat16
    model's generator and trainer closer together.
    """
    max_model_len: Annotated[int, Field(ge=8)] = 4096
    """Longest trajectory in tokens, prompt included."""
    adapter: AdapterSettings | None = None
    """Trains low-rank adapters (LoRA) in the place of the weights, which stay frozen; only adapters
    are sent to generators. They take about ten times the learning rate. `{}` takes the defaults.
    """
    cache: Annotated[ModelCacheSettings | None, CLUSTER_ONLY] = None
    """Where pods keep the models that they download or make; unset gives each pod a folder of its
    own.
    """


class SamplingSettings(Settings):
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Sampling temperature. Log-probabilities are recorded and trained at this temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus mass. Below 1 the recorded log-probabilities are those of the truncated distribution.
    """
    top_k: Annotated[int, Field(ge=-1)] = -1
    """Number of candidates, -1 for all."""
    max_tokens: Annotated[int, Field(ge=1)] = 1024
    """Most tokens sampled per request."""
    stop: list[str] = Field(default=[], max_length=16)
    """Strings that end a completion, kept in the text."""


class TaskSettings(Settings):
    path: TaskPath
    """The task's class as `package.module:Name`. See `pipelinerl_actor.task` for the interface."""
    args: TaskArgs = {}
    """Keyword arguments of the task's class."""
    group_size: Annotated[int, Field(ge=1, le=4096)] = 8
    """Trajectories per prompt (G)."""
    sampling: SamplingSettings = SamplingSettings()
    """How completions are sampled."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Longest time for one trajectory, verification included."""
    verifier_timeout_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Longest time for one call of the verifier."""
    max_retries: Annotated[int, Field(ge=0, le=100)] = 3
    """How often a trajectory is tried again after a temporary error."""
    min_group_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a group's trajectories that must succeed for the group to be published."""
