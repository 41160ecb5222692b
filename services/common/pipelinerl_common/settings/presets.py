"""The named algorithms: what `spec.algorithm.loss` fills in. A new one is one line here.

An algorithm is a composition: importance weights, a surrogate that bounds them, an advantage, a
normaliser, regularisers. Each field of a preset is a setting of the same name and can be set by
hand. Formulas are in services/trainer/ALGORITHMS.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Loss = Literal["reinforce", "ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"]
Surrogate = Literal["score", "clip"]
Importance = Literal["token", "sequence", "geometric", "none"]
Outside = Literal["truncate", "mask"]
Baseline = Literal["leave_one_out", "mean", "none", "value"]
NormalizeBy = Literal["sequences", "tokens", "sequence_means", "max_tokens"]

CLIP = 0.2
"""Both clip bounds where a preset without them is given `surrogate: clip`."""


@dataclass(frozen=True, slots=True)
class Preset:
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


def _clip(**fields: Any) -> Preset:
    return Preset(**{"surrogate": "clip", "truncation": 0.0, "baseline": "mean", **fields})


PRESETS: Mapping[Loss, Preset] = {
    "reinforce": Preset(),
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
    "cispo": Preset(baseline="mean", divide_by_std=True, normalize_by="tokens"),
    "rloo": Preset(importance="sequence"),
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
