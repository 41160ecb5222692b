"""verl's `drop` strategy: finished groups over the threshold are evicted and replaced when a batch
is assembled.
"""

from dataclasses import dataclass

from pipelinerl_staleness.policy import Take
from pipelinerl_staleness.verl import Verl, VerlSettings


@dataclass(frozen=True, slots=True)
class VerlDropSettings(VerlSettings):
    """verl `max_off_policy_strategy: drop`."""


class VerlDrop(Verl):
    """Evicts every finished group with span > eta, then takes the B oldest stamps. Strict: at most
    eta - 1.

    Running groups are not looked at; those that turn stale finish first and are evicted then.
    Progress is certain because the version stands still while the trainer waits, so replacements
    admitted meanwhile are young enough.
    """

    settings_type = VerlDropSettings

    def take(self, step: int) -> Take:
        stale = [
            group
            for group, stamp in self.groups.ready.items()
            if self.span(stamp, step) > self.settings.eta
        ]
        dropped = self.cancel(tuple(stale))
        return self.deliver(self.groups.ready_by_stamp(), dropped)

    def bound(self) -> int:
        return self.settings.eta - 1
