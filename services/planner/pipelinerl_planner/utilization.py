"""U(h): the share of a GPU's peak that decoding h sequences at once reaches. A built-in curve, or
one measured here.

The built-in curve is a smooth corner between a slope through the origin (decoding waits for memory)
and a ceiling (arithmetic):

    U(h) = slope * h / (1 + (slope * h / ceiling) ** sharpness) ** (1 / sharpness)

The PipelineRL paper (arXiv 2509.19128) shows its H100 curve as a figure only. The three constants
are fitted to what its case study publishes: 44 GPUs at h=192 generate 16.9 tokens/flash, so U(192)
= 0.384; conventional RL with 134 optimizer steps a round on 128 GPUs, whose batches per GPU fall
from 134 to 0, generates 18.3; the greatest speed-up is at a lag of about 133. The first gives a
point, the second the slope, the third how fast the curve bends: at h=192 U grows by 0.8 % for each
% of h.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipelinerl_common.errors import SettingsError

Floats = NDArray[np.float64]


class Utilization(Protocol):
    """The function U(h) on arrays, 0 at 0 and positive above."""

    @property
    def source(self) -> str:
        """Where the curve comes from, as text."""
        ...

    @property
    def peak_tokens_per_second(self) -> float | None:
        """Tokens per second of one GPU where U is 1, that is 1/flash; None when unknown."""
        ...

    def __call__(self, h: ArrayLike) -> Floats: ...


@dataclass(frozen=True, slots=True)
class FittedCurve:
    """The built-in curve. Example: FittedCurve()(192) is 0.384."""

    slope: float = 0.002145
    """Slope per sequence at small h."""
    ceiling: float = 0.62
    """U at large h."""
    sharpness: float = 3.3
    """Sharpness of the corner between slope and ceiling."""

    @property
    def source(self) -> str:
        return "built-in H100 curve, fitted to the paper's numbers"

    @property
    def peak_tokens_per_second(self) -> float | None:
        return None

    def __call__(self, h: ArrayLike) -> Floats:
        linear = self.slope * np.asarray(h, dtype=np.float64)
        bent: Floats = linear / (1 + (linear / self.ceiling) ** self.sharpness) ** (
            1 / self.sharpness
        )
        return bent


@dataclass(frozen=True, slots=True)
class MeasuredCurve:
    """A measured curve: lines from the origin through the points, level after the last."""

    batch_sizes: tuple[float, ...]
    """h, rising, above 0."""
    values: tuple[float, ...]
    """U at each, above 0."""
    source: str
    peak_tokens_per_second: float | None = None

    def __call__(self, h: ArrayLike) -> Floats:
        return np.interp(
            np.asarray(h, dtype=np.float64), (0.0, *self.batch_sizes), (0.0, *self.values)
        )


def read_utilization(path: Path) -> MeasuredCurve:
    """Reads a file of `pipelinerl calibrate`: {"peak_tokens_per_second": ..., "points": [{"h": 1,
    "tokens_per_second": 60.0, "utilization": 0.02}, ...]}. Raises SettingsError that names the
    file, the value and the remedy.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--utilization {path}: cannot be read: {error}") from error
    except ValueError as error:
        raise SettingsError(f"--utilization {path}: not JSON: {error}") from error
    if (
        not isinstance(document, dict)
        or not isinstance(document.get("points"), list)
        or not document["points"]
    ):
        raise SettingsError(
            f"--utilization {path}: has no list `points`; write the file with `pipelinerl "
            "calibrate`"
        )
    points = [
        (_number(path, index, point, "h"), _number(path, index, point, "utilization"))
        for index, point in enumerate(document["points"])
    ]
    batch_sizes = tuple(h for h, _ in points)
    if any(later <= earlier for earlier, later in pairwise(batch_sizes)):
        raise SettingsError(
            f"--utilization {path}: h must rise from point to point, but is {list(batch_sizes)}"
        )
    values = tuple(value for _, value in points)
    if max(values) > 1.0001:
        raise SettingsError(
            f"--utilization {path}: utilization={max(values):g} is above 1: the peak given to "
            "calibrate is too low"
        )
    peak = (
        _number(path, None, document, "peak_tokens_per_second")
        if "peak_tokens_per_second" in document
        else None
    )
    return MeasuredCurve(batch_sizes, values, f"measured, {path}", peak)


def _number(path: Path, index: int | None, holder: Any, name: str) -> float:
    where = f"{path}" if index is None else f"{path}: points[{index}]"
    value = holder.get(name) if isinstance(holder, Mapping) else None
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not isfinite(value)
        or value <= 0
    ):
        raise SettingsError(f"--utilization {where}: {name}={value!r} must be a number above 0")
    return float(value)
