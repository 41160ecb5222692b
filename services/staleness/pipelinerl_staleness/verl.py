"""verl's two strategies against old groups: `drop` evicts and replaces finished groups over the
threshold when a batch is assembled; `wait` makes the trainer wait for running ones and drops none.
"""

from dataclasses import dataclass
from math import ceil

from pipelinerl_staleness.checks import number, whole
from pipelinerl_staleness.groups import GroupPolicy
from pipelinerl_staleness.policy import PolicySettings, Take


@dataclass(frozen=True, slots=True)
class VerlSettings(PolicySettings):
    """Parameters that both strategies share."""

    eta: int = whole(8, at_least=1)
    """Threshold of the span k - stamp + 1 of a group (verl `max_off_policy_threshold`), at least 1.
    """
    num_warmup_batches: float = number(1, at_least=0)
    """Batches admitted at the start beyond the first one (verl `num_warmup_batches`), at least 0,
    fractions allowed.
    """


class Verl(GroupPolicy):
    """Admits W batches once and B groups with each version, one more for every group that was
    evicted or failed.
    """

    settings: VerlSettings

    def may_admit(self) -> bool:
        return self.within_capacity(self.settings.num_warmup_batches)

    def span(self, stamp: int, step: int) -> int:
        """The number of versions from a group's admission to the step that would train it, both
        counted.
        """
        return step - stamp + 1

    def max_outstanding(self) -> int:
        return self.groups_per_step + int(self.settings.num_warmup_batches * self.groups_per_step)


@dataclass(frozen=True, slots=True)
class VerlDropSettings(VerlSettings):
    """verl `max_off_policy_strategy: drop`."""


class VerlDrop(Verl):
    """Evicts every finished group with span > eta, then takes the B oldest stamps. Strict: at most
    eta - 1.

    Running groups are not looked at; those that turn stale finish first and are evicted then.
    Progress is certain because the version does not change while the trainer waits, so replacements
    admitted meanwhile are young enough.
    """

    settings_type = VerlDropSettings

    def take(self, step: int) -> Take:
        eta = self.settings.eta
        stale = [
            group for group, stamp in self.groups.ready.items() if self.span(stamp, step) > eta
        ]
        dropped = self.cancel(tuple(stale))
        return self.deliver(self.groups.ready_by_stamp(), dropped)

    def bound(self) -> int:
        return self.settings.eta - 1


@dataclass(frozen=True, slots=True)
class VerlWaitSettings(VerlSettings):
    """verl `max_off_policy_strategy: wait`."""


class VerlWait(Verl):
    """Waits while a running group has span >= eta, then takes the B oldest stamps of the finished.

    A finished group blocks nothing, so the bound is not eta - 1 but max(W, eta + W - 2): when
    version a is first used, at most W B groups of stamp <= a remain, at version a + eta - 1 all of
    those have finished, and W batches, oldest stamps first, use them up. The bound is attained.
    """

    settings_type = VerlWaitSettings

    def take(self, step: int) -> Take:
        if len(self.groups.ready) < self.groups_per_step:
            return self.wait(f"{len(self.groups.ready)} of {self.groups_per_step} groups ready")
        running = self.groups.num_running_by_stamp
        blocking = sum(
            number
            for stamp, number in running.items()
            if self.span(stamp, step) >= self.settings.eta
        )
        if blocking:
            return self.wait(f"{blocking} running groups reach the threshold {self.settings.eta}")
        return self.deliver(self.groups.ready_by_stamp())

    def bound(self) -> int:
        warmup = ceil(self.settings.num_warmup_batches)
        return max(warmup, self.settings.eta + warmup - 2)

    def min_waiting(self) -> int:
        return self.max_outstanding()
