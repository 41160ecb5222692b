"""PSRL's reserve, occupy, consume: every group reserves a slot in a batch that it can certainly
reach.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from pipelinerl_staleness.checks import whole
from pipelinerl_staleness.groups import GroupPolicy
from pipelinerl_staleness.policy import PolicySettings, Take


@dataclass(frozen=True, slots=True)
class PsrlSettings(PolicySettings):
    """Parameters of `psrl`."""

    eta: int = whole(0, at_least=0)
    """Oldest age of a trained group in versions (PSRL `staleness`), at least 0; 0 is synchronous.
    """


class Psrl(GroupPolicy):
    """Buffer b has B slots and becomes the batch of step b. A group admitted at version w reserves
    a slot in the latest buffer of [w, w + eta] that has a free one. When it finishes it gives that
    up and occupies the earliest free slot it may use, after one swap: the first reservation of an
    earlier buffer that may also live in the given-up slot moves there. Buffer k is trained when all
    its slots are occupied. Strict, because no slot is later than stamp + eta.

    A restored ledger may not know the newest version yet, and its groups then outnumber the slots:
    the earliest buffer behind the window takes what was admitted under that version.
    """

    settings_type = PsrlSettings
    settings: PsrlSettings
    keeps_kv = True

    def __init__(self, settings: PsrlSettings, groups_per_step: int) -> None:
        super().__init__(settings, groups_per_step)
        self._slots: dict[int, dict[str, None]] = {}
        self._buffer_of: dict[str, int] = {}

    def may_admit(self) -> bool:
        return self._latest_free(self.version) is not None

    def admitted(self, group: str) -> None:
        super().admitted(group)
        self._reserve(group, self.version)

    def started(self, group: str, version: int) -> None:
        if version < self.groups.stamp(group, version):
            self._move_forward(group, version)
        self.groups.restamp(group, version)

    def first_token(self, group: str, version: int) -> None:
        if version < self.groups.stamp(group, version):
            self._move_forward(group, version)
        self.groups.lower_stamp(group, version)

    def finished(self, group: str) -> None:
        if not self.groups.finish(group):
            return
        own = self._buffer_of[group]
        self._leave(group)
        swapped = next(
            (other for other in self._earlier_reservations(own) if self._may_hold(own, other)), None
        )
        if swapped is not None:
            self._leave(swapped)
            self._enter(swapped, own)
        earliest = next(b for b in range(self._step(), own + 1) if self._has_free(b))
        self._enter(group, earliest)

    def lost(self, group: str) -> None:
        super().lost(group)
        self._leave(group)

    def take(self, step: int) -> Take:
        self._fill_holes(step)
        batch = tuple(self._slots.get(step, ()))
        unfinished = [group for group in batch if group in self.groups.running]
        if unfinished or len(batch) < self.groups_per_step:
            return self.wait(
                f"buffer {step} has {len(batch) - len(unfinished)} of {self.groups_per_step} slots "
                "occupied"
            )
        for group in batch:
            self._leave(group)
        return self.deliver(batch)

    def recover(self, step: int, version: int) -> None:
        super().recover(step, version)
        self._slots.clear()
        self._buffer_of.clear()

    def bound(self) -> int:
        return self.settings.eta

    def max_outstanding(self) -> int:
        return (self.settings.eta + 1) * self.groups_per_step

    def min_waiting(self) -> int:
        return self.max_outstanding()

    def _step(self) -> int:
        return self.num_taken // self.groups_per_step

    def _has_free(self, buffer: int) -> bool:
        return len(self._slots.get(buffer, ())) < self.groups_per_step

    def _latest_free(self, stamp: int) -> int | None:
        return next(
            (
                b
                for b in range(stamp + self.settings.eta, self._step() - 1, -1)
                if self._has_free(b)
            ),
            None,
        )

    def _may_hold(self, buffer: int, group: str) -> bool:
        return buffer <= self.groups.running[group] + self.settings.eta

    def _reserve(self, group: str, stamp: int) -> None:
        buffer = self._latest_free(stamp)
        if buffer is None:
            behind = count(max(self._step(), stamp + self.settings.eta + 1))
            buffer = next(b for b in behind if self._has_free(b))
        self._enter(group, buffer)

    def _enter(self, group: str, buffer: int) -> None:
        self._slots.setdefault(buffer, {})[group] = None
        self._buffer_of[group] = buffer

    def _leave(self, group: str) -> None:
        buffer = self._buffer_of.pop(group, None)
        if buffer is not None:
            del self._slots[buffer][group]
            if not self._slots[buffer]:
                del self._slots[buffer]

    def _earlier_reservations(self, buffer: int) -> Iterator[str]:
        earlier = range(self._step(), buffer)
        return (
            group
            for b in earlier
            for group in self._slots.get(b, ())
            if group in self.groups.running
        )

    def _move_forward(self, group: str, version: int) -> None:
        """Gives a restored group, older than the version served now, a slot that it can reach."""
        self._leave(group)
        self._reserve(group, version)

    def _fill_holes(self, step: int) -> None:
        """A slot that a failed group left moves to the end: ready groups of later buffers move up,
        the oldest first.
        """
        for group in self.groups.ready_by_stamp():
            if not self._has_free(step):
                return
            if self._buffer_of[group] > step:
                self._leave(group)
                self._enter(group, step)
