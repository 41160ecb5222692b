"""What charts are made of: series, axes and their ticks, the scale, numbers in words."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 36
FRAME = (WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM)
"""The pointer script needs them too."""
MAX_POINTS = 600
NUM_COLOURS = 6
CLOCK_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200)
DAY_S = 86400


def compact(value: float) -> str:
    """Example: 0.25 is "0.25", 1500 is "1.5k", 2e6 is "2M"."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def clock(seconds: float) -> str:
    """Example: 45 is "45 s", 90 is "1:30", 3700 is "1:01:40"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def duration(seconds: float) -> str:
    """Example: 0.05 is "50 ms", 2.5 is "2.5 s"."""
    return f"{seconds * 1000:.3g} ms" if abs(seconds) < 1 else f"{seconds:.3g} s"


FORMS: dict[str, Callable[[float], str]] = {"number": compact, "clock": clock, "duration": duration}


@dataclass(frozen=True, slots=True)
class Line:
    """A series. `colour` is the number of a page colour, 0 to NUM_COLOURS - 1."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int = 0
    style: Literal["line", "faint", "dashed", "area", "band"] = "line"
    floor: Sequence[float] | None = None
    """The lower edge of an "area" or a "band", value by value. The pointer shows an area's height;
    a band is the range around a line, and the pointer does not show it.
    """

    @property
    def is_named(self) -> bool:
        """Whether it appears in the legend and under the pointer."""
        return self.style not in ("faint", "band")


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis measures and where it begins and ends."""

    label: str
    kind: Literal["number", "clock", "duration"] = "number"
    """The form of a value at a tick and beside the pointer."""
    low: float | None = None
    """The axis begins here; None for the data's own range."""
    high: float | None = None
    cuts: bool = False
    """Values below `low` are drawn at `low`, instead of widening the axis."""

    def form(self, value: float) -> str:
        return FORMS[self.kind](value)

    def range_of(self, values: Sequence[float]) -> tuple[float, float]:
        low = min(values) if self.low is None else min(self.low, min(values))
        if self.cuts and self.low is not None:
            low = self.low
        high = max(values) if self.high is None else max(self.high, max(values))
        if high == low == self.low:  # all values at the axis' beginning: it still begins there
            high = low + (abs(low) or 1.0)
        return low, high


@dataclass(frozen=True, slots=True)
class PlotScale:
    """Maps values to places in the picture; values outside are drawn at its edge."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / ((self.x1 - self.x0) or 1) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (min(max(value, self.y0), self.y1) - self.y0) / ((self.y1 - self.y0) or 1)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def points(self, xs: Sequence[float], ys: Sequence[float]) -> str:
        places = zip(map(self.x, xs), map(self.y, ys), strict=True)
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)

    def outline(self, line: "Line") -> str:
        """The edge of an area or a band: along its top and back along its floor."""
        floor = [0.0] * len(line.xs) if line.floor is None else line.floor
        return self.points([*line.xs, *line.xs[::-1]], [*line.ys, *floor[::-1]])


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that cover low to high. Example: ticks(0, 0.83) is [0, 0.2, 0.4, 0.6, 0.8,
    1.0].
    """
    span = high - low
    if span <= 0:
        span = abs(high) or 1.0
        low, high = low - span / 2, high + span / 2
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(k * step, 12) for k in range(first, last + 1)]


def clock_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Like `ticks`, in seconds that are round on a clock. Example: clock_ticks(0, 250) is [0, 60,
    120, 180, 240, 300].
    """
    raw = max(1.0, (high - low) / count)
    days = math.ceil(raw / DAY_S) * DAY_S
    step = next((seconds for seconds in CLOCK_STEPS if seconds >= raw * 0.999), days)
    last = math.ceil(max(high, low + step) / step)
    return [float(k * step) for k in range(math.floor(low / step), last + 1)]


def thin(
    xs: Sequence[float], ys: Sequence[float], most: int = MAX_POINTS
) -> tuple[list[float], list[float]]:
    """About `most` points at most: the lowest and the highest of each stretch, so that no spike is
    lost.
    """
    if len(xs) <= most:
        return list(xs), list(ys)
    keep: set[int] = {0, len(xs) - 1}
    stretches = most // 2
    for k in range(stretches):
        stretch = range(k * len(xs) // stretches, (k + 1) * len(xs) // stretches)
        keep |= {min(stretch, key=ys.__getitem__), max(stretch, key=ys.__getitem__)}
    order = sorted(keep)
    return [xs[k] for k in order], [ys[k] for k in order]


def smooth(ys: Sequence[float], window: int) -> list[float]:
    """Mean of the numbers among the last `window` values, fewer at the beginning; not-a-number
    where there is none.
    """
    sums, counts = [0.0], [0]
    for value in ys:
        is_number = math.isfinite(value)
        sums.append(sums[-1] + (value if is_number else 0.0))
        counts.append(counts[-1] + is_number)
    means = []
    for end in range(1, len(sums)):
        start = max(0, end - window)
        count = counts[end] - counts[start]
        means.append((sums[end] - sums[start]) / count if count else math.nan)
    return means
