"""Dressage's rule: keep the groups whose last tokens come from the newest K versions that were
seen.
"""

from dataclasses import dataclass

from pipelinerl_staleness.checks import choice, optional_whole, whole
from pipelinerl_staleness.groups import GroupPolicy
from pipelinerl_staleness.policy import PolicySettings, Take


@dataclass(frozen=True, slots=True)
class DressageSettings(PolicySettings):
    """Parameters of `dressage`."""

    keep_versions: int = whole(0, at_least=0)
    """Number of the newest end versions that are kept (Dressage
    `dressage_staleness_keep_versions`); 0 keeps all.
    """
    scope: str = choice("group", "trajectory")
    """`group`: the end version of the group's last trajectory decides. `trajectory`: any trajectory
    that ended too early drops its group (Dressage's code).
    """
    max_active: int | None = optional_whole(at_least=1)
    """Groups that run at once (Dressage `DRESSAGE_ASYNC_MAX_ACTIVE_GROUPS`); unset is one batch."""
    max_queue: int = whole(800, at_least=1)
    """Finished groups that wait at most before admission stops (80 % of Dressage's queue of 1000).
    """
    max_version_switches: int | None = optional_whole(at_least=0)
    """Weight changes that one trajectory may see before its group is cancelled (Dressage
    `max_partial_rollout_preempts`).
    """


class Dressage(GroupPolicy):
    """Versions are labels in the order in which they were first seen at the end of a trajectory of
    a finished group, so the window lags behind the trainer and looks at a group's youngest tokens:
    no bound on the oldest ones.

    Groups are observed when a batch is assembled, in the order of finishing. A group without labels
    is kept.
    """

    settings_type = DressageSettings
    settings: DressageSettings

    def __init__(self, settings: DressageSettings, groups_per_step: int) -> None:
        super().__init__(settings, groups_per_step)
        self._max_active = groups_per_step if settings.max_active is None else settings.max_active
        self._max_queue = max(settings.max_queue, groups_per_step)
        self._end_versions: dict[str, list[int]] = {}
        self._first_versions: dict[str, int] = {}
        self._seen: dict[int, int] = {}

    def may_admit(self) -> bool:
        return (
            len(self.groups.running) < self._max_active and len(self.groups.ready) < self._max_queue
        )

    def first_token(self, group: str, version: int) -> None:
        super().first_token(group, version)
        if group in self.groups.running:
            self._first_versions[group] = min(version, self._first_versions.get(group, version))

    def last_token(self, group: str, version: int) -> None:
        if group in self.groups and version >= 0:
            self._end_versions.setdefault(group, []).append(version)

    def lost(self, group: str) -> None:
        super().lost(group)
        self._forget((group,))

    def published(self, version: int) -> tuple[str, ...]:
        super().published(version)
        limit = self.settings.max_version_switches
        if limit is None:
            return ()
        over = tuple(
            g
            for g in self.groups.running
            if self.version - self._first_versions.get(g, self.version) > limit
        )
        self._forget(over)
        return self.cancel(over)

    def take(self, step: int) -> Take:
        for group in self.groups.ready:
            for version in self._deciding(group):
                self._seen.setdefault(version, len(self._seen))
        stale = tuple(group for group in self.groups.ready if self._is_stale(group))
        dropped = self.cancel(stale)
        taken = self.deliver(self.groups.ready, dropped)
        self._forget((*taken.groups, *taken.dropped))
        return taken

    def recover(self, step: int, version: int) -> None:
        super().recover(step, version)
        self._end_versions.clear()
        self._first_versions.clear()
        self._seen.clear()

    def bound(self) -> None:
        return None

    def max_outstanding(self) -> int:
        return self._max_active + self._max_queue - 1

    def _deciding(self, group: str) -> list[int]:
        ends = self._end_versions.get(group, [])
        return ends if self.settings.scope == "trajectory" else ends[-1:]

    def _is_stale(self, group: str) -> bool:
        keep = self.settings.keep_versions
        oldest = len(self._seen) - keep if keep else 0
        return any(self._seen[version] < oldest for version in self._deciding(group))

    def _forget(self, groups: tuple[str, ...]) -> None:
        for group in groups:
            self._end_versions.pop(group, None)
            self._first_versions.pop(group, None)
