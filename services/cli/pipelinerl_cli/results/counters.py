"""Counters of processes that may begin again at 0."""

from collections.abc import Iterable
from itertools import chain, pairwise


def increase(before: float, now: float) -> float:
    """Of a counter; less than before means that its process began again at 0. Example: increase(5,
    1) is 1.
    """
    return now - before if now >= before else now


def counter_total(values: Iterable[float]) -> float:
    """The sum of a counter's increases. Example: [3, 5, 1, 4] is 5 + 4 = 9."""
    return sum(increase(before, now) for before, now in pairwise(chain([0.0], values)))
