"""Where response lengths come from: a fitted distribution, the article's constructed load, or a
user's own trace.

Distributions of response lengths, as the throughput model needs them: how many sequences still
run after l tokens.
"""

import csv
import json
from dataclasses import dataclass
from itertools import chain
from math import sqrt
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipelinerl_common.errors import SettingsError


class Lengths(Protocol):
    """The lengths of groups in the order in which prompts are drawn, equal for every policy."""

    def group(self, index: int) -> tuple[int, tuple[int, ...]]:
        """Returns the prompt tokens of group `index` and the response tokens of each trajectory.
        Raises IndexError after the last group.
        """
        ...


class LognormalLengths:
    """Response lengths median * exp(group_sigma * z_group + own_sigma * z_own), capped; z standard
    normal.

    The defaults are fitted to the article's data on its load: preemptions, prefilled tokens, shares
    and mean lengths of dropped trajectories. Their mean is near 11 thousand tokens, that of what a
    strict policy with drops trains near 9 thousand.
    """

    _CHUNK = 256

    def __init__(
        self,
        seed: int,
        group_size: int = 8,
        *,
        median: float = 8500.0,
        group_sigma: float = 0.7,
        own_sigma: float = 0.3,
        cap: int = 38912,
        prompt: int = 150,
    ) -> None:
        self._seed = seed
        self._group_size = group_size
        self._median = median
        self._sigmas = group_sigma, own_sigma
        self._cap = cap
        self._prompt = prompt
        self._chunk_index = -1
        self._chunk: list[list[int]] = []

    def group(self, index: int) -> tuple[int, tuple[int, ...]]:
        chunk, place = divmod(index, self._CHUNK)
        if chunk != self._chunk_index:
            self._chunk = self._draw(chunk)
            self._chunk_index = chunk
        return self._prompt, tuple(self._chunk[place])

    def _draw(self, chunk: int) -> list[list[int]]:
        rng = np.random.default_rng([self._seed, chunk])
        of_group = rng.standard_normal((self._CHUNK, 1)) * self._sigmas[0]
        own = rng.standard_normal((self._CHUNK, self._group_size)) * self._sigmas[1]
        lengths = self._median * np.exp(of_group + own)
        drawn: list[list[int]] = np.clip(lengths, 1, self._cap).astype(int).tolist()
        return drawn


class ConstructedLengths:
    """The article's adversarial load: a fast batch, two slow ones, then fast ones only."""

    def __init__(
        self, seed: int, groups_per_step: int, group_size: int = 8, prompt: int = 150
    ) -> None:
        self._seed = seed
        self._slow = range(groups_per_step, 3 * groups_per_step)
        self._group_size = group_size
        self._prompt = prompt

    def group(self, index: int) -> tuple[int, tuple[int, ...]]:
        least, most = (25_000, 31_000) if index in self._slow else (300, 700)
        rng = np.random.default_rng([self._seed, index])
        return self._prompt, tuple(
            rng.integers(least, most, self._group_size, endpoint=True).tolist()
        )


@dataclass(frozen=True, slots=True)
class TraceLengths:
    """Recorded groups, repeated after the last one if `repeat`."""

    groups: tuple[tuple[int, tuple[int, ...]], ...]
    repeat: bool = True

    def group(self, index: int) -> tuple[int, tuple[int, ...]]:
        if index >= len(self.groups) and not self.repeat:
            raise IndexError(f"the trace has {len(self.groups)} groups")
        return self.groups[index % len(self.groups)]


def read_trace(path: Path, group_size: int) -> TraceLengths:
    """Reads a trace of one trajectory per line, in drawing order: CSV with a header, or JSONL.

    Columns: `response_tokens`, and if known `prompt_tokens` and `group` (lines of one group are
    adjacent). Without `group` every `group_size` lines are one. Raises ValueError that names file,
    line and remedy.
    """
    rows = list(_rows(path))
    groups: list[tuple[int, tuple[int, ...]]] = []
    start = 0
    for index in range(1, len(rows) + 1):
        by_name = rows[start].group is not None
        ends = index == len(rows) or (
            rows[index].group != rows[start].group if by_name else index - start == group_size
        )
        if ends:
            groups.append((rows[start].prompt, tuple(row.response for row in rows[start:index])))
            start = index
    if not groups:
        raise ValueError(f"{path} has no line with response_tokens")
    sizes = {len(lengths) for _, lengths in groups}
    if sizes != {group_size}:
        raise ValueError(
            f"{path} has groups of {sorted(sizes)} trajectories, expected {group_size}: set "
            "--group-size"
        )
    return TraceLengths(tuple(groups))


@dataclass(frozen=True, slots=True)
class _Row:
    group: str | None
    prompt: int
    response: int


def _rows(path: Path) -> list[_Row]:
    if path.suffix not in (".csv", ".jsonl"):
        raise ValueError(f"{path} must end in .csv or .jsonl")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text: {error}") from error
    if path.suffix == ".csv":
        return [
            _row(path, number, record)
            for number, record in enumerate(csv.DictReader(lines), start=2)
        ]
    return [_row(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def _row(path: Path, number: int, line: str | dict[str, Any]) -> _Row:
    try:
        record = json.loads(line) if isinstance(line, str) else line
        response, prompt = (
            int(str(record["response_tokens"])),
            int(str(record.get("prompt_tokens") or 0)),
        )
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} line {number}: response_tokens (and prompt_tokens) must be whole numbers: "
            f"{error}"
        ) from error
    if response < 1 or prompt < 0:
        raise ValueError(
            f"{path} line {number}: response_tokens={response} must be at least 1, "
            f"prompt_tokens={prompt} at least 0"
        )
    group = record.get("group")
    return _Row(None if group is None else str(group), prompt, response)


MAX_LENGTH = 4_000_000
"""Longest response that is planned for, in tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class LengthDistribution:
    """A distribution of response lengths, as its survival function. Example: lengths 1 and 3,
    equally likely, have survival [1, 0.5, 0.5], mean 2 and maximum 3.
    """

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
    """Returns equally likely lengths from `least` to `most`; the paper's case study has least 1."""
    name = f"uniform:{least}:{most}"
    _check(1 <= least <= most <= MAX_LENGTH, name, f"1 <= least <= most <= {MAX_LENGTH}")
    lengths = np.arange(1, most + 1)
    return LengthDistribution(np.clip((most - lengths + 1) / (most - least + 1), 0, 1), name)


def lognormal(median: float, sigma: float, cap: int) -> LengthDistribution:
    """Returns median * exp(sigma * z), z standard normal, rounded up and capped at `cap` tokens."""
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
    """Returns the distribution in which each length is as frequent as in `lengths`."""
    counts = np.bincount(np.asarray(lengths, dtype=np.int64))[1:]
    return LengthDistribution(counts[::-1].cumsum()[::-1] / len(lengths), name)


def parse_lengths(text: str, group_size: int) -> LengthDistribution:
    """Parses `uniform:LEAST:MOST`, `lognormal:MEDIAN:SIGMA:CAP`, or the name of a trace file of
    `pipelinerl simulate`. Raises SettingsError.
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
    """Returns the standard normal distribution function; error below 1.5e-7 (Abramowitz and Stegun
    7.1.26).
    """
    x = np.abs(z) / sqrt(2)
    t = 1 / (1 + 0.3275911 * x)
    series = t * (
        0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    )
    upper = 0.5 * series * np.exp(-(x**2))
    return np.where(z > 0, 1 - upper, upper)
