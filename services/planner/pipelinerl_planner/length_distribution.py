"""Distributions of response lengths, as the throughput model needs them: how many sequences still
run after l tokens.
"""

from dataclasses import dataclass
from itertools import chain
from math import sqrt
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipelinerl_common.errors import SettingsError
from pipelinerl_planner.lengths import read_trace

MAX_LENGTH = 4_000_000
"""Longest response that is planned for, in tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class LengthDistribution:
    """Example: lengths 1 and 3, equally likely, have survival [1, 0.5, 0.5], mean 2 and maximum 3."""

    survival: NDArray[np.float64]
    """P(length >= l) for l = 1, ..., L, where L is the longest response. The first is 1, the last
    above 0.
    """
    name: str

    @property
    def mean(self) -> float:
        """Mean response length in tokens: the sum of the survival."""
        return float(self.survival.sum())

    @property
    def longest(self) -> int:
        """L, in tokens."""
        return len(self.survival)


def uniform(least: int, most: int) -> LengthDistribution:
    """All whole lengths from `least` to `most` equally likely; the paper's case study has least 1."""
    name = f"uniform:{least}:{most}"
    _check(1 <= least <= most <= MAX_LENGTH, name, f"1 <= least <= most <= {MAX_LENGTH}")
    lengths = np.arange(1, most + 1)
    return LengthDistribution(np.clip((most - lengths + 1) / (most - least + 1), 0, 1), name)


def lognormal(median: float, sigma: float, cap: int) -> LengthDistribution:
    """median * exp(sigma * z), z standard normal, rounded up to whole tokens and cut at `cap`."""
    name = f"lognormal:{median:g}:{sigma:g}:{cap}"
    _check(
        0 < median < 1e9 and 0 < sigma <= 10 and 1 <= cap <= MAX_LENGTH,
        name,
        f"median > 0, 0 < sigma <= 10, cap <= {MAX_LENGTH}",
    )
    passed = np.log(np.maximum(np.arange(cap), 1e-12) / median) / sigma
    survival = 1 - _normal_cdf(passed)
    survival[0] = 1.0
    alive = survival[: int(np.count_nonzero(survival > 1e-12))]
    return LengthDistribution(alive, name)


def empirical(lengths: list[int], name: str) -> LengthDistribution:
    """As often as they occur."""
    counts = np.bincount(np.asarray(lengths, dtype=np.int64))[1:]
    return LengthDistribution(counts[::-1].cumsum()[::-1] / len(lengths), name)


def parse_lengths(text: str, group_size: int) -> LengthDistribution:
    """`uniform:LEAST:MOST`, `lognormal:MEDIAN:SIGMA:CAP`, or a trace file of `pipelinerl simulate`.
    Raises SettingsError.
    """
    kind, *parts = text.split(":")
    try:
        if kind == "uniform" and len(parts) == 2:
            return uniform(int(parts[0]), int(parts[1]))
        if kind == "lognormal" and len(parts) == 3:
            return lognormal(float(parts[0]), float(parts[1]), int(parts[2]))
        if kind not in ("uniform", "lognormal") and Path(text).suffix in (".csv", ".jsonl"):
            trace = read_trace(Path(text), group_size)
            return empirical(
                list(chain.from_iterable(lengths for _, lengths in trace.groups)), f"trace {text}"
            )
    except (ValueError, OSError) as error:
        raise SettingsError(f"--lengths {text}: {error}") from error
    raise SettingsError(
        f"--lengths {text}: expected uniform:LEAST:MOST, lognormal:MEDIAN:SIGMA:CAP, or a trace "
        "file: .csv or .jsonl"
    )


def _check(holds: bool, name: str, needed: str) -> None:
    if not holds:
        raise SettingsError(f"--lengths {name}: needs {needed}")


def _normal_cdf(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standard normal distribution function; error below 1.5e-7 (Abramowitz and Stegun 7.1.26)."""
    x = np.abs(z) / sqrt(2)
    t = 1 / (1 + 0.3275911 * x)
    series = t * (
        0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    )
    upper = 0.5 * series * np.exp(-(x**2))
    return np.where(z > 0, 1 - upper, upper)
