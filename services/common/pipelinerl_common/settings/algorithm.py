"""`spec.algorithm`: the objective, the optimizer, the batch, and the named algorithms.

An algorithm is a composition: importance weights, a surrogate that bounds them, an advantage, a
normaliser, regularisers. `loss` names one of PRESETS, whose fields are defaults of the settings of
the same names. A new algorithm is one line there. docs/pages/explanation/algorithms.md has the
formulas.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from pipelinerl_common.settings.base import Settings

log = logging.getLogger(__name__)

Loss = Literal["reinforce", "ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"]
Surrogate = Literal["score", "clip"]
Importance = Literal["token", "sequence", "geometric", "none"]
Outside = Literal["truncate", "mask"]
Baseline = Literal["leave_one_out", "mean", "none", "value"]
NormalizeBy = Literal["sequences", "tokens", "sequence_means", "max_tokens"]

CLIP = 0.2
"""Both clip bounds of a preset of `score` where the job sets `surrogate: clip`."""


@dataclass(frozen=True, slots=True)
class LossPreset:
    """Defaults of a named algorithm; those of this class are of `reinforce`."""

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


def _preset(name: str) -> Any:
    """A field whose default is that of the preset."""
    return Field(default_factory=partial(_preset_value, name))


def _preset_value(name: str, data: Mapping[str, Any]) -> Any:
    """The preset's value of a field; `data` are the fields before it.

    0 (no bound) for a truncation without weights to truncate and for clip bounds without a
    clipping surrogate; 1 for the lambda of advantages without a value head.
    """
    if name == "truncation" and (data["surrogate"] != "score" or data["importance"] == "none"):
        return 0.0
    if name in _CLIP_BOUNDS and data["surrogate"] != "clip":
        return 0.0
    if name == "gae_lambda" and data["baseline"] != "value":
        return 1.0
    return getattr(PRESETS[data["loss"]], name)


_CLIP_BOUNDS = ("clip_low", "clip_high")


def _moved_field(name: str) -> Callable[[dict[str, Any]], None]:
    """Keeps the old place of a field in the schema, since a Kubernetes server removes fields that
    its schema lacks before anybody could read them.
    """
    description = f"Deprecated: moved to `algorithm.experimental.{name}`."

    def add(schema: dict[str, Any]) -> None:
        schema["properties"][name] = {"type": "number", "minimum": 0, "description": description}

    return add


class OptimizerSettings(Settings):
    """AdamW and the schedule of its learning rate."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate of AdamW."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.95,
    )
    """Decay rates of AdamW's first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Epsilon of AdamW."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay; 0 is none."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 0.3
    """Largest global norm of the gradient, which is scaled down to it."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up, over `steps`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps of linear warm-up from 0."""
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Learning rate at the end of a linear or cosine schedule, as a share of the peak."""

    model_config = ConfigDict(json_schema_extra=_moved_field("delayCompensation"))


class KLSettings(Settings):
    """Penalty on the divergence from a reference model."""

    coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL penalty to the reference model; 0 is no penalty. Above 0 it needs
    `spec.reference`.
    """
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence from one token: `k1` is the log-ratio, `k2` half its square, `k3`
    is unbiased and never negative.
    """
    placement: Literal["loss", "reward"] = "loss"
    """Place of the penalty. `loss`: a term beside the policy loss, at the current weights.
    `reward`: subtracted from the reward, at the weights that sampled the token.
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
    """Treatment of completions that are too long."""

    completions: Literal["keep", "mask"] = "keep"
    """Contribution of a truncated completion (finish reason `length`): `keep` trains it, `mask`
    excludes its loss.
    """
    penalty_buffer_tokens: Annotated[int, Field(ge=0)] = 0
    """Soft penalty: the reward falls linearly from 0 to -1 over this many last tokens before
    `maxTokens`; 0 is none.
    """


class ExperimentalSettings(Settings):
    """Switches that were measured and are not recommended; see the verdict in algorithms.md."""

    gradient_mixing: Annotated[float, Field(ge=0)] = 0.0
    """Mixes the delayed gradient (every weight 1) and the importance-weighted one as 1 to this, for
    `surrogate: score`; 0 is off.
    """
    delay_compensation: Annotated[float, Field(ge=0)] = 0.0
    """Weight of AdamW's second-order term that moves a delayed gradient to the current weights; 0
    is off.
    """


def _from_old_places(document: Any) -> Any:
    """`document` with gradientMixing and optimizer.delayCompensation, where job files had them
    before, moved to `experimental`.

    A server whose defaults still have the old places fills in 0 there, which says nothing. Raises
    ValueError for a field that is set in both places.
    """
    if not isinstance(document, dict):
        return document
    moved = dict(document)
    if isinstance(moved.get("optimizer"), dict):
        moved["optimizer"] = dict(moved["optimizer"])
    for section, prefix, name in (
        (moved, "", "gradient_mixing"),
        (moved.get("optimizer"), "optimizer.", "delay_compensation"),
    ):
        camel = to_camel(name)
        spelled = camel if isinstance(section, dict) and camel in section else name
        value = section.pop(spelled, 0) if isinstance(section, dict) else 0
        given = moved.get("experimental") or {}
        if (value is not False and value == 0) or not isinstance(given, dict):
            continue
        experimental = {to_camel(str(key)): each for key, each in given.items()}
        if other := experimental.get(camel):
            raise ValueError(
                f"{prefix}{camel}={value} and experimental.{camel}={other} are one setting: "
                "remove the first"
            )
        moved["experimental"] = {**experimental, camel: value}
        _warn_moved(prefix + camel, camel)
    return moved


@cache  # once per process: an operator reads a job again and again
def _warn_moved(path: str, name: str) -> None:
    log.warning(
        "spec.algorithm.%s has moved: write spec.algorithm.experimental.%s instead", path, name
    )


class AlgorithmSettings(Settings):
    """The objective, the optimizer and the batch."""

    steps: Annotated[int, Field(ge=1, le=1000000000)] = 1000
    """Number of optimizer steps of the run."""
    groups_per_step: Annotated[int, Field(ge=1, le=1000000)] = 128
    """Number of groups per optimizer step (B); a step trains B times `task.groupSize` trajectories.
    """
    loss: Loss = "reinforce"
    """The named algorithm. It sets the fields from `surrogate` to `dropZeroAdvantage`, except those
    that are given here.
    """
    surrogate: Surrogate = _preset("surrogate")
    """Form of the policy loss. `score`: advantage times log-probability, times the bounded
    importance weight without gradient. `clip`: the ratio carries the gradient and is clipped, as in
    PPO.
    """
    importance: Importance = _preset("importance")
    """Unit of the importance weights: each `token`, the whole `sequence` (product), its `geometric`
    mean, or `none` (every weight is 1).
    """
    truncation: Annotated[float, Field(ge=0)] = _preset("truncation")
    """Upper bound c of the importance weights, for `surrogate: score`; 0 is none."""
    truncation_low: Annotated[float, Field(ge=0)] = 0.0
    """Lower bound of the importance weights, for `surrogate: score`; 0 is none."""
    outside: Outside = "truncate"
    """Treatment of a weight beyond its bounds, for `surrogate: score`: `truncate` sets it to the
    bound, `mask` excludes the token.
    """
    clip_low: Annotated[float, Field(ge=0, lt=1)] = _preset("clip_low")
    """Distance below 1 at which the ratio is clipped, for `surrogate: clip`; 0 with `score`."""
    clip_high: Annotated[float, Field(ge=0)] = _preset("clip_high")
    """Distance above 1 at which the ratio is clipped, for `surrogate: clip`; 0 with `score`."""
    baseline: Baseline = _preset("baseline")
    """Baseline of the reward: the mean of the group's other trajectories (`leave_one_out`) or of
    the whole group (`mean`), none, or a learned value head (`value`).
    """
    divide_by_std: bool = _preset("divide_by_std")
    """Divides advantages by the standard deviation of the group's rewards."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = _preset("gae_lambda")
    """Lambda of generalised advantage estimation, for `baseline: value`; 1 is return minus value, 0
    the one-step error.
    """
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of the reward per sampled token, for `baseline: value`."""
    normalize_by: NormalizeBy = _preset("normalize_by")
    """Divisor of the sum over tokens: the step's number of `sequences` (the paper) or trained
    `tokens`; `sequence_means` averages over each sequence's tokens, then over sequences;
    `max_tokens` is sequences times `task.sampling.maxTokens`.
    """
    drop_zero_advantage: bool = _preset("drop_zero_advantage")
    """Replaces groups whose trajectories all have the same reward before batching."""
    value_coefficient: Annotated[float, Field(ge=0)] = 0.1
    """Weight of the value head's squared error in the loss, for `baseline: value`."""
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus; 0 is none."""
    kl: KLSettings = KLSettings()
    """Penalty on the divergence from a reference model."""
    overlong: OverlongSettings = OverlongSettings()
    """Treatment of completions that are too long."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """AdamW and the schedule of its learning rate."""
    experimental: ExperimentalSettings = ExperimentalSettings()
    """Switches that were measured and are not recommended."""

    model_config = ConfigDict(json_schema_extra=_moved_field("gradientMixing"))
    _old_places = model_validator(mode="before")(_from_old_places)

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
        if faults := [_message(self, rule) for rule in _RULES if rule.is_fault(self)]:
            raise ValueError("; ".join(faults))
        return self


class _Rule(NamedTuple):
    """A composition that is no algorithm, and the message about it."""

    is_fault: Callable[[AlgorithmSettings], bool]
    fields: tuple[str, ...]
    """Fields behind {given} in the message, which shows those that the job sets, with values."""
    message: str
    """{it} and {has} agree with {given}; {surrogate} is the field of that name with its value, and
    the preset that has set it.
    """


def _message(settings: AlgorithmSettings, rule: _Rule) -> str:
    given = [name for name in rule.fields if name in settings.model_fields_set] or list(rule.fields)
    words = {name: _with_preset(settings, name) for name in AlgorithmSettings.model_fields}
    words["given"] = " and ".join(_named(settings, name) for name in given)
    words["mixing"] = str(settings.experimental.gradient_mixing)
    words["it"], words["has"] = ("it", "has") if len(given) == 1 else ("them", "have")
    return rule.message.format(**words)


def _with_preset(settings: AlgorithmSettings, name: str) -> str:
    """Example: "surrogate=score (loss=reinforce)" where that loss has set it."""
    preset = "" if name in settings.model_fields_set else f" (loss={settings.loss})"
    return f"{_named(settings, name)}{preset}"


def _named(settings: AlgorithmSettings, name: str) -> str:
    value = getattr(settings, name)
    return f"{to_camel(name)}={str(value).lower() if isinstance(value, bool) else value}"


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
        lambda a: (
            a.experimental.gradient_mixing > 0
            and (a.surrogate != "score" or a.importance == "none")
        ),
        (),
        "experimental.gradientMixing={mixing} mixes importance weights with 1, but {surrogate} and "
        "{importance}: set surrogate=score with a weight, or remove it",
    ),
)
