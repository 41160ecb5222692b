"""The named algorithms: what `spec.algorithm.loss` fills in. A new one is one line here.

An algorithm is a composition: importance weights, a surrogate that bounds them, an advantage, a
normaliser, regularisers. Each field of a preset is a setting of the same name and can be set by
hand. Formulas are in docs/pages/explanation/algorithms.md.

`spec.algorithm`: the objective, the optimizer, the batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator
from pydantic.alias_generators import to_camel

from pipelinerl_common.settings.base import Settings

Loss = Literal["reinforce", "ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"]
Surrogate = Literal["score", "clip"]
Importance = Literal["token", "sequence", "geometric", "none"]
Outside = Literal["truncate", "mask"]
Baseline = Literal["leave_one_out", "mean", "none", "value"]
NormalizeBy = Literal["sequences", "tokens", "sequence_means", "max_tokens"]

CLIP = 0.2
"""Both clip bounds where a preset without them is given `surrogate: clip`."""


@dataclass(frozen=True, slots=True)
class LossPreset:
    """One row of the table; the defaults are those of `reinforce`."""

    surrogate: Surrogate = "score"
    importance: Importance = "token"
    truncation: float = 5.0
    clip_low: float = CLIP
    clip_high: float = CLIP
    baseline: Baseline = "leave_one_out"
    divide_by_std: bool = False
    gae_lambda: float = 1.0
    normalize_by: NormalizeBy = "sequences"
    drop_zero_advantage: bool = False


def _clip(**fields: Any) -> LossPreset:
    return LossPreset(**{"surrogate": "clip", "truncation": 0.0, "baseline": "mean", **fields})


PRESETS: Mapping[Loss, LossPreset] = {
    "reinforce": LossPreset(),
    "ppo": _clip(baseline="value", gae_lambda=0.95, normalize_by="tokens"),
    "grpo": _clip(divide_by_std=True, normalize_by="sequence_means"),
    "dr_grpo": _clip(normalize_by="max_tokens"),
    "dapo": _clip(
        clip_high=0.28, divide_by_std=True, normalize_by="tokens", drop_zero_advantage=True
    ),
    "gspo": _clip(
        importance="geometric",
        clip_low=3e-4,
        clip_high=4e-4,
        divide_by_std=True,
        normalize_by="sequence_means",
    ),
    "cispo": LossPreset(baseline="mean", divide_by_std=True, normalize_by="tokens"),
    "rloo": LossPreset(importance="sequence"),
}


def preset_field(name: str, data: Mapping[str, Any]) -> Any:
    """The preset's value of a field, for pydantic's default factories; `data` are the fields before
    it.
    """
    return getattr(PRESETS[data["loss"]], name)


def truncation(data: Mapping[str, Any]) -> float:
    """Of the preset, where there are weights to be truncated; else 0, no bound."""
    is_weighted = data["surrogate"] == "score" and data["importance"] != "none"
    return PRESETS[data["loss"]].truncation if is_weighted else 0.0


def clip_bound(name: str, data: Mapping[str, Any]) -> float:
    """Of the preset, where the surrogate clips; else 0."""
    return float(getattr(PRESETS[data["loss"]], name)) if data["surrogate"] == "clip" else 0.0


def gae_lambda(data: Mapping[str, Any]) -> float:
    """Of the preset, where there is a value head; 1 is what an advantage without one has."""
    return PRESETS[data["loss"]].gae_lambda if data["baseline"] == "value" else 1.0


class OptimizerSettings(Settings):
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """AdamW's peak learning rate."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.95,
    )
    """AdamW's decay rates of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 0.3
    """Gradients are scaled down to this global norm."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up, over `steps`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up from 0."""
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Where linear and cosine schedules end, as a share of the peak."""
    delay_compensation: Annotated[float, Field(ge=0)] = 0.0
    """Experimental: weight of the second-order term that moves a delayed gradient to the current
    weights; 0 is plain AdamW.
    """


class KLSettings(Settings):
    coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL penalty to the reference model. Above 0 it needs `spec.reference`."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence from one token: `k1` log-ratio, `k2` half its square, `k3` never
    negative and unbiased.
    """
    placement: Literal["loss", "reward"] = "loss"
    """`loss`: a term beside the policy loss, at the current weights. `reward`: subtracted from the
    reward, at the weights that sampled the token, so that the advantages see it.
    """

    @model_validator(mode="after")
    def _teaches(self) -> "KLSettings":
        if self.estimator == "k1" and self.placement == "loss":
            raise ValueError(
                "kl.estimator=k1 with kl.placement=loss has a gradient that is 0 in expectation: "
                "set kl.placement=reward, or "
                "kl.estimator=k2, whose gradient in the loss is that of k1 in the reward"
            )
        return self


class OverlongSettings(Settings):
    completions: Literal["keep", "mask"] = "keep"
    """What a truncated completion (finish reason `length`) contributes: its loss, or nothing
    (masked).
    """
    penalty_buffer_tokens: Annotated[int, Field(ge=0)] = 0
    """Soft penalty: the reward falls linearly from 0 to -1 over this many last tokens before
    `maxTokens`; 0 is off.
    """


class AlgorithmSettings(Settings):
    steps: Annotated[int, Field(ge=1, le=1000000000)] = 1000
    """Optimizer steps of the run."""
    groups_per_step: Annotated[int, Field(ge=1, le=1000000)] = 128
    """Groups per optimizer step (B); a step trains B times `task.groupSize` trajectories."""
    loss: Loss = "reinforce"
    """The named algorithm. It fills in the fields from here to `dropZeroAdvantage`; each can be set
    by hand.
    """
    surrogate: Surrogate = Field(default_factory=partial(preset_field, "surrogate"))
    """`score`: advantage times log-probability, weighted by the importance weight, which is bounded
    and has no gradient.
    `clip`: the ratio itself carries the gradient and is clipped, as in PPO."""
    importance: Importance = Field(default_factory=partial(preset_field, "importance"))
    """What the importance weight is a ratio of: each `token`, the whole `sequence` (product), its
    `geometric` mean, or `none` (every weight is 1).
    """
    truncation: Annotated[float, Field(ge=0)] = Field(default_factory=truncation)
    """`score`: importance weights above this (c) are truncated, or masked by `outside`; 0 is no
    bound.
    """
    truncation_low: Annotated[float, Field(ge=0)] = 0.0
    """`score`: importance weights below this are raised to it, or masked by `outside`; 0 is no
    bound.
    """
    outside: Outside = "truncate"
    """`score`: what happens to a weight beyond its bounds: it is truncated to them, or the token
    contributes nothing.
    """
    clip_low: Annotated[float, Field(ge=0, lt=1)] = Field(
        default_factory=partial(clip_bound, "clip_low")
    )
    """`clip`: the ratio is clipped below 1 minus this; 0 with `score`."""
    clip_high: Annotated[float, Field(ge=0)] = Field(
        default_factory=partial(clip_bound, "clip_high")
    )
    """`clip`: the ratio is clipped above 1 plus this; 0 with `score`."""
    baseline: Baseline = Field(default_factory=partial(preset_field, "baseline"))
    """What is subtracted from the reward: the mean of the group's other trajectories, of the whole
    group, nothing, or a learned value head.
    """
    divide_by_std: bool = Field(default_factory=partial(preset_field, "divide_by_std"))
    """Whether advantages are divided by the standard deviation of the group's rewards."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = Field(default_factory=gae_lambda)
    """`baseline: value`: generalised advantage estimation; 1 is return minus value, 0 the one-step
    error.
    """
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """`baseline: value`: discount of the reward per sampled token."""
    normalize_by: NormalizeBy = Field(default_factory=partial(preset_field, "normalize_by"))
    """What the sum over tokens is divided by: the step's number of `sequences` (the paper) or of
    trained `tokens`;
    `sequence_means` averages over each sequence's tokens and then over sequences; `max_tokens` divides by the number of
    sequences times `task.sampling.maxTokens`."""
    drop_zero_advantage: bool = Field(default_factory=partial(preset_field, "drop_zero_advantage"))
    """Groups whose trajectories all have the same reward are dropped before batching, and their
    slots given back.
    """
    value_coefficient: Annotated[float, Field(ge=0)] = 0.1
    """`baseline: value`: weight of the value head's squared error in the loss."""
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    gradient_mixing: Annotated[float, Field(ge=0)] = 0.0
    """Experimental, `score`: the delayed gradient (every weight 1) and the importance-weighted one
    are mixed as 1 to this; 0 is the importance-weighted one alone.
    """
    kl: KLSettings = KLSettings()
    """Closeness to a reference model."""
    overlong: OverlongSettings = OverlongSettings()
    """What becomes of completions that are too long."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """AdamW and the schedule of its learning rate."""

    @model_validator(mode="after")
    def _warmup_fits(self) -> "AlgorithmSettings":
        if self.optimizer.warmup_steps > self.steps:
            raise ValueError(
                f"optimizer.warmupSteps={self.optimizer.warmup_steps} is more than "
                f"steps={self.steps}"
            )
        return self

    @model_validator(mode="after")
    def _makes_sense(self) -> "AlgorithmSettings":
        faults = senseless(self)
        if faults:
            raise ValueError("; ".join(faults))
        return self


class _Rule(NamedTuple):
    is_fault: Callable[[AlgorithmSettings], bool]
    fields: tuple[str, ...]
    """What the message calls {given}: of these, the ones that were set by hand, with their values.
    """
    message: str
    """{it} and {has} go with {given}; {surrogate} is the field of that name with its value, and
    whose preset it is.
    """


def senseless(settings: AlgorithmSettings) -> list[str]:
    """Every fault of the composition, each with what to set instead."""
    return [_message(settings, rule) for rule in _RULES if rule.is_fault(settings)]


def _message(settings: AlgorithmSettings, rule: _Rule) -> str:
    given = [name for name in rule.fields if name in settings.model_fields_set] or list(rule.fields)
    words = {name: _told(settings, name) for name in AlgorithmSettings.model_fields}
    words["given"] = " and ".join(_named(settings, name) for name in given)
    words["it"], words["has"] = ("it", "has") if len(given) == 1 else ("them", "have")
    return rule.message.format(**words)


def _told(settings: AlgorithmSettings, name: str) -> str:
    """Example: "surrogate=score (loss=reinforce)" where that loss has set it."""
    preset = "" if name in settings.model_fields_set else f" (loss={settings.loss})"
    return f"{_named(settings, name)}{preset}"


def _named(settings: AlgorithmSettings, name: str) -> str:
    value = getattr(settings, name)
    return f"{to_camel(name)}={str(value).lower() if isinstance(value, bool) else value}"


_CLIP_BOUNDS = ("clip_low", "clip_high")
_RULES: tuple[_Rule, ...] = (
    _Rule(
        lambda a: a.surrogate == "clip" and a.importance == "none",
        (),
        "{surrogate} takes its gradient from the ratio and {importance} has none: set "
        "importance=token or surrogate=score",
    ),
    _Rule(
        lambda a: a.surrogate == "clip" and (a.clip_low == 0 or a.clip_high == 0),
        _CLIP_BOUNDS,
        "{surrogate} needs both bounds, but {given}: set {it} above 0",
    ),
    _Rule(
        lambda a: (
            a.surrogate == "clip"
            and (a.truncation > 0 or a.truncation_low > 0 or a.outside == "mask")
        ),
        ("truncation", "truncation_low", "outside"),
        "{given} {has} no effect with {surrogate}: remove {it}, or set surrogate=score",
    ),
    _Rule(
        lambda a: a.surrogate == "score" and (a.clip_low > 0 or a.clip_high > 0),
        _CLIP_BOUNDS,
        "{given} {has} no effect with {surrogate}: remove {it}, or set surrogate=clip; `score` is "
        "bounded by truncation and "
        "truncationLow",
    ),
    _Rule(
        lambda a: a.importance == "none" and (a.truncation > 0 or a.truncation_low > 0),
        ("truncation", "truncation_low"),
        "importance=none has no weight for {given} to bound: remove {it}, or set importance=token",
    ),
    _Rule(
        lambda a: 0 < a.truncation <= a.truncation_low,
        (),
        "{truncation_low} must be below {truncation}",
    ),
    _Rule(
        lambda a: (
            a.surrogate == "score"
            and a.outside == "mask"
            and a.truncation == 0
            and a.truncation_low == 0
        ),
        (),
        "outside=mask has no bound to mask beyond: set truncation or truncationLow",
    ),
    _Rule(
        lambda a: a.divide_by_std and a.baseline in ("value", "none"),
        (),
        "{divide_by_std} divides by the spread around the group's mean, but {baseline}: set "
        "baseline=mean or "
        "baseline=leave_one_out, or divideByStd=false",
    ),
    _Rule(
        lambda a: a.baseline != "value" and (a.gae_lambda != 1 or a.discount != 1),
        ("gae_lambda", "discount"),
        "{given} {has} no effect without a value head, but {baseline}: set baseline=value, or "
        "remove {it}",
    ),
    _Rule(
        lambda a: a.baseline == "value" and a.value_coefficient == 0,
        (),
        "valueCoefficient=0 never trains the value head of {baseline}: set it above 0, or another "
        "baseline",
    ),
    _Rule(
        lambda a: a.drop_zero_advantage and a.baseline in ("value", "none"),
        (),
        "{drop_zero_advantage} drops groups of equal rewards, which teach with {baseline}: set "
        "dropZeroAdvantage=false, or "
        "baseline=mean",
    ),
    _Rule(
        lambda a: a.gradient_mixing > 0 and (a.surrogate != "score" or a.importance == "none"),
        (),
        "{gradient_mixing} mixes importance weights with 1, but {surrogate} and {importance}: set "
        "surrogate=score with a "
        "weight, or remove it",
    ),
)
