"""`spec.model` and `spec.task`: what is trained, and on what."""

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
"""Keyword arguments of a task's class; an empty `args:` means none."""


class AdapterSettings(Settings):
    """Low-rank adapters (LoRA): the weights are frozen, and a product of two thin matrices beside
    each is trained.
    """

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Rank r: a target's update is B times A, with r columns in B and r rows in A."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Each update is multiplied by alpha / rank."""
    target_modules: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=256)]],
            Field(min_length=1, max_length=256),
        ]
        | None
    ) = None
    """Linear layers that get an adapter, by their names or the ends of them, such as `q_proj` or
    `layers.0.mlp.up_proj`. Unset: all of the decoder, without the head.
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
    """Source of the model: a local folder in Hugging Face format, `hf://organisation/name`, or
    `tiny://arithmetic` (a character-level model, pre-trained on the spot, for trials without a
    GPU).
    """
    revision: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Branch, tag or commit of an `hf://` model. Unset: the default branch."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Element type of the generators' weights and of the weight transfer. Use float32 on a CPU."""
    head_dtype: Literal["model", "float32"] = "model"
    """Element type in which the language model's head computes logits everywhere: `model` is that
    of the weights; `float32` brings the log-probabilities of a bfloat16 model's generator and
    trainer closer together.
    """
    max_model_len: Annotated[int, Field(ge=8)] = 4096
    """Longest trajectory in tokens, prompt included."""
    adapter: AdapterSettings | None = None
    """Trains low-rank adapters (LoRA) instead of the weights; only adapters are sent to the
    generators. They need about ten times the learning rate. Unset trains all weights; `{}` uses the
    defaults.
    """
    cache: Annotated[ModelCacheSettings | None, CLUSTER_ONLY] = None
    """Where pods store the models that they download or create. Unset: a folder of each pod's own.
    """


class SamplingSettings(Settings):
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Sampling temperature. Log-probabilities are recorded and trained at this temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Probability mass of nucleus sampling. Below 1 the recorded log-probabilities are those of the
    truncated distribution.
    """
    top_k: Annotated[int, Field(ge=-1)] = -1
    """Number of candidates for sampling; -1 takes all."""
    max_tokens: Annotated[int, Field(ge=1)] = 1024
    """Largest number of tokens sampled per request."""
    stop: list[str] = Field(default=[], max_length=16)
    """Strings that end a completion; they stay in its text."""


class TaskSettings(Settings):
    path: TaskPath
    """Class of the task as `package.module:Name`. `pipelinerl_actor.task` documents the interface.
    """
    args: TaskArgs = {}
    """Keyword arguments of the task's class."""
    group_size: Annotated[int, Field(ge=1, le=4096)] = 8
    """Number of trajectories sampled for each prompt (G)."""
    sampling: SamplingSettings = SamplingSettings()
    """Sampling parameters of the completions."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Longest time for one trajectory in seconds, verification included."""
    verifier_timeout_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Longest time for one call of the verifier, in seconds."""
    max_retries: Annotated[int, Field(ge=0, le=100)] = 3
    """Number of retries of a trajectory after temporary errors."""
    min_group_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a group's trajectories that must succeed for the group to be published; 1 requires
    all.
    """
