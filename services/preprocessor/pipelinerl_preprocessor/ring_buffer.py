"""The finished groups that wait for training: bounded, the oldest gives way."""

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class RingBuffer(Generic[T]):
    """Groups by id, in the order in which they finished, each with the time at which it came.

    Example with room for two: add a, b, c; `add` of c returns a, which is no longer inside.
    """

    def __init__(self, max_groups: int) -> None:
        if max_groups < 1:
            raise ValueError(f"max_groups={max_groups} must be at least 1")
        self.max_groups = max_groups
        self._waiting: dict[str, tuple[float, T]] = {}

    def add(self, group_id: str, group: T, now: float) -> T | None:
        """Returns the oldest group when it had to give way; the caller counts it and gives its slot back."""
        self._waiting[group_id] = (now, group)
        if len(self._waiting) <= self.max_groups:
            return None
        return self._waiting.pop(next(iter(self._waiting)))[1]

    def pop(self, group_id: str) -> T | None:
        entry = self._waiting.pop(group_id, None)
        return None if entry is None else entry[1]

    def get(self, group_id: str) -> T | None:
        entry = self._waiting.get(group_id)
        return None if entry is None else entry[1]

    def oldest_age(self, now: float) -> float:
        """Seconds that the oldest group has waited; 0 when none waits."""
        return now - next(iter(self._waiting.values()))[0] if self._waiting else 0.0

    def clear(self) -> list[T]:
        """Empties the buffer and returns what was in it."""
        groups = [group for _, group in self._waiting.values()]
        self._waiting.clear()
        return groups

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[str]:
        return iter(self._waiting)
