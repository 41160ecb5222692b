"""The groups that a policy has admitted and that have not ended, each running or ready, with a
version stamp; and the base class of the policies that decide by them.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from pipelinerl_staleness.policy import Policy, Take


class Groups:
    """Running and ready groups, each with its stamp: a version never newer than the one that
    sampled its first token.

    Example: after admit("a", 3), admit("b", 3), finish("b"): running {"a": 3}, ready {"b": 3} in
    order of finishing.
    """

    def __init__(self) -> None:
        self.running: dict[str, int] = {}
        self.ready: dict[str, int] = {}
        self.num_running_by_stamp: dict[int, int] = {}
        self._order: dict[str, int] = {}
        self._num_dispatched = 0

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, group: str) -> bool:
        return group in self._order

    def admit(self, group: str, stamp: int) -> None:
        if group in self._order:
            raise ValueError(f"group {group!r} is admitted twice")
        self.running[group] = stamp
        self._count_running(stamp, 1)
        self._order[group] = self._num_dispatched
        self._num_dispatched += 1

    def lower_stamp(self, group: str, version: int) -> None:
        if version < self.stamp(group, version):
            self.restamp(group, version)

    def restamp(self, group: str, version: int) -> None:
        """Replaces the stamp of a known group; an unknown one is ignored."""
        if group in self.running:
            self._count_running(self.running[group], -1)
            self.running[group] = version
            self._count_running(version, 1)
        elif group in self.ready:
            self.ready[group] = version

    def stamp(self, group: str, default: int) -> int:
        return self.running[group] if group in self.running else self.ready.get(group, default)

    def finish(self, group: str) -> bool:
        """Makes a running group ready. False when it was not running."""
        if group not in self.running:
            return False
        stamp = self.running.pop(group)
        self._count_running(stamp, -1)
        self.ready[group] = stamp
        return True

    def remove(self, group: str) -> None:
        """Forgets a group; an unknown one is ignored."""
        if group in self.running:
            self._count_running(self.running.pop(group), -1)
        self.ready.pop(group, None)
        self._order.pop(group, None)

    def dispatch_order(self, group: str) -> int:
        return self._order[group]

    def in_dispatch_order(self) -> tuple[str, ...]:
        return tuple(self._order)

    def ready_by_dispatch(self) -> list[str]:
        return sorted(self.ready, key=self._order.__getitem__)

    def ready_by_stamp(self) -> list[str]:
        """Ready groups, oldest stamp first, ties by dispatch order."""
        return sorted(self.ready, key=lambda group: (self.ready[group], self._order[group]))

    def running_before(self, stamp: int) -> tuple[str, ...]:
        return tuple(group for group, version in self.running.items() if version < stamp)

    def ready_before(self, stamp: int) -> tuple[str, ...]:
        return tuple(group for group, version in self.ready.items() if version < stamp)

    def oldest_ready(self, needed: int) -> list[str] | int:
        """`needed` ready groups from the oldest stamps, in dispatch order within a stamp; or the
        stamp that must be waited for.

        A younger stamp is touched only when every group of the older ones is in the batch, so a
        stamp with fewer groups than a batch is completed from the next one and never stalls.
        """
        chosen: list[str] = []
        ready = self.ready_by_stamp()
        for stamp in sorted({*self.num_running_by_stamp, *self.ready.values()}):
            of_stamp = [group for group in ready if self.ready[group] == stamp]
            chosen += of_stamp[: needed - len(chosen)]
            if len(chosen) == needed:
                return chosen
            if stamp in self.num_running_by_stamp:
                return stamp
        return chosen

    def _count_running(self, stamp: int, change: int) -> None:
        left = self.num_running_by_stamp.get(stamp, 0) + change
        if left:
            self.num_running_by_stamp[stamp] = left
        else:
            del self.num_running_by_stamp[stamp]


class GroupPolicy(Policy):
    """A policy of whole groups. Credit is never stored: it is recomputed from the groups that are
    still outstanding, so a drop, a failure or a restart can return neither too little nor too much
    of it.

    The stamp of a group is the version served when it was admitted or, newest report, started. A
    first token corrects it downwards only, so the age that the policy sees is never less than the
    true one.
    """

    def __init__(self, settings: Any, groups_per_step: int) -> None:
        super().__init__(settings, groups_per_step)
        self.groups = Groups()
        self.num_taken = 0

    def admitted(self, group: str) -> None:
        self.groups.admit(group, self.version)

    def started(self, group: str, version: int) -> None:
        self.groups.restamp(group, version)

    def first_token(self, group: str, version: int) -> None:
        self.groups.lower_stamp(group, version)

    def finished(self, group: str) -> None:
        self.groups.finish(group)

    def lost(self, group: str) -> None:
        self.groups.remove(group)

    def recover(self, step: int, version: int) -> None:
        self.groups = Groups()
        self.num_taken = step * self.groups_per_step
        self.version = version

    def outstanding(self) -> Sequence[str]:
        return self.groups.in_dispatch_order()

    def within_capacity(self, head_start: float) -> bool:
        """The capacity law: while version w is served, at most (w + 1 + head_start) B groups,
        rounded down, are ever admitted and not lost.
        """
        batch = self.groups_per_step
        return self.num_taken + len(self.groups) < (self.version + 1) * batch + int(
            head_start * batch
        )

    def cancel(self, groups: tuple[str, ...]) -> tuple[str, ...]:
        """Removes `groups` and returns them as the groups to cancel or drop."""
        for group in groups:
            self.groups.remove(group)
        return groups

    def deliver(self, candidates: Iterable[str], dropped: tuple[str, ...] = ()) -> Take:
        """The first B of the ready `candidates`, or a wait when there are fewer."""
        chosen = tuple(candidates)[: self.groups_per_step]
        if len(chosen) < self.groups_per_step:
            return self.wait(f"{len(chosen)} of {self.groups_per_step} groups ready", dropped)
        for group in chosen:
            self.groups.remove(group)
        self.num_taken += len(chosen)
        return Take(groups=chosen, dropped=dropped)

    def deliver_in_dispatch_order(self) -> Take:
        """The B earliest dispatched of all outstanding groups once all of them have finished."""
        batch = self.groups.in_dispatch_order()[: self.groups_per_step]
        running = sum(group in self.groups.running for group in batch)
        if running:
            return self.wait(f"{running} of the earliest {len(batch)} groups unfinished")
        return self.deliver(batch)

    def deliver_oldest_first(self, dropped: tuple[str, ...] = ()) -> Take:
        """B groups of the oldest stamps, waiting for the running ones among them: this keeps a
        bound without dropping.
        """
        chosen = self.groups.oldest_ready(self.groups_per_step)
        if isinstance(chosen, int):
            return self.wait(f"groups started at version {chosen} come first", dropped)
        return self.deliver(chosen, dropped)

    def wait(self, why: str, dropped: tuple[str, ...] = ()) -> Take:
        return Take(dropped=dropped, wait_reason=f"{why}, {len(self.groups.running)} running")


class TrajectoryPolicy(GroupPolicy):
    """A policy that counts the trajectories in flight. A group holds one slot for each of its
    `settings.group_size` trajectories from its admission; each that finishes frees its own.

    Example with groups of 8: admitted("a"), admitted("b"), trajectory_finished("a"): 15 in flight.
    """

    def __init__(self, settings: Any, groups_per_step: int) -> None:
        super().__init__(settings, groups_per_step)
        self._held: dict[str, int] = {}
        self.num_in_flight = 0

    def admitted(self, group: str) -> None:
        super().admitted(group)
        self._held[group] = self.settings.group_size
        self.num_in_flight += self.settings.group_size

    def trajectory_finished(self, group: str) -> None:
        if self._held.get(group, 0) > 0:
            self._held[group] -= 1
            self.num_in_flight -= 1

    def finished(self, group: str) -> None:
        super().finished(group)
        self._free(group)

    def lost(self, group: str) -> None:
        super().lost(group)
        self._free(group)

    def cancel(self, groups: tuple[str, ...]) -> tuple[str, ...]:
        for group in groups:
            self._free(group)
        return super().cancel(groups)

    def recover(self, step: int, version: int) -> None:
        super().recover(step, version)
        self._held.clear()
        self.num_in_flight = 0

    def _free(self, group: str) -> None:
        self.num_in_flight -= self._held.pop(group, 0)
