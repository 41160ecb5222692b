"""The finished groups that wait for training: bounded, the oldest gives way."""


class RingBuffer:
    """Ids of waiting groups in the order in which they finished.

    Example with room for two: add a, b, c; `add` of c returns a, which is no longer inside.
    """

    def __init__(self, max_groups: int) -> None:
        if max_groups < 1:
            raise ValueError(f"max_groups={max_groups} must be at least 1")
        self.max_groups = max_groups
        self._waiting: dict[str, None] = {}

    def add(self, group_id: str) -> str | None:
        """Returns the oldest group when it had to give way; the caller counts it and gives its slot
        back.
        """
        self._waiting[group_id] = None
        if len(self._waiting) <= self.max_groups:
            return None
        oldest = next(iter(self._waiting))
        del self._waiting[oldest]
        return oldest

    def discard(self, group_id: str) -> None:
        self._waiting.pop(group_id, None)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, group_id: object) -> bool:
        return group_id in self._waiting
