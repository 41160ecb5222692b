"""Slots held by the trajectories of running groups, for policies that admit by trajectories."""


class TrajectorySlots:
    """A group holds one slot per trajectory from its admission; each finished trajectory frees its
    own.

    Example with groups of 8: hold("a"), hold("b"), free_one("a"): num_held 15.
    """

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._held: dict[str, int] = {}
        self.num_held = 0

    def hold(self, group: str) -> None:
        self._held[group] = self._group_size
        self.num_held += self._group_size

    def free_one(self, group: str) -> bool:
        """Whether the group still held a slot."""
        if self._held.get(group, 0) == 0:
            return False
        self._held[group] -= 1
        self.num_held -= 1
        return True

    def free(self, group: str) -> None:
        """Frees what the group still holds: it has finished, failed or been cancelled."""
        self.num_held -= self._held.pop(group, 0)
