"""Which actor works on which group and until when, and the current session of each actor. Part of
the ledger; independent of policies.
"""

from collections.abc import Iterable

from pipelinerl_preprocessor.groups import Group, GroupLease, GroupState, GroupTable


class Sessions:
    """The newest session of each actor; a restarted actor has a new one. Actors are forgotten that
    have not called for `forget_s`.
    """

    def __init__(self, forget_s: float) -> None:
        self._forget_s = forget_s
        self._newest: dict[str, tuple[str, float]] = {}

    def seen(self, actor_id: str, session_id: str, now: float) -> bool:
        """Notes a call. True when this session was not the actor's current one until now."""
        new = self._newest.get(actor_id, ("", 0.0))[0] != session_id
        self._newest[actor_id] = (session_id, now)
        return new

    def is_current(self, actor_id: str, session_id: str) -> bool:
        """Whether no newer session of the actor has called."""
        return self._newest.get(actor_id, (session_id, 0.0))[0] == session_id

    def forget_silent(self, now: float) -> None:
        self._newest = {
            actor: seen for actor, seen in self._newest.items() if now - seen[1] < self._forget_s
        }

    def actors(self) -> list[str]:
        """The actors that have called recently, ordered by name."""
        return sorted(self._newest)

    def __len__(self) -> int:
        return len(self._newest)


class Leases:
    """Leases over the groups of `groups`. A lease lasts `lease_s` from its grant or renewal."""

    def __init__(self, groups: GroupTable, lease_s: float) -> None:
        self._groups = groups
        self.lease_s = lease_s
        self.sessions = Sessions(forget_s=10 * lease_s)

    def assign(self, group: Group, actor_id: str, session_id: str, now: float) -> GroupLease:
        """Starts a new attempt at a WAITING group."""
        self._groups.move(group, GroupState.LEASED)
        group.attempt += 1
        group.actor_id, group.session_id = actor_id, session_id
        group.expires_at = now + self.lease_s
        return GroupLease(
            group.lease_id, group.group_id, group.attempt, group.prompt_index, group.partial
        )

    def adopt(self, group: Group, now: float) -> None:
        """Adds a group from the journal as LEASED: its actor may still be working on it."""
        group.state, group.expires_at = GroupState.LEASED, now + self.lease_s
        self._groups.add(group)
        self.sessions.seen(group.actor_id, group.session_id, now)

    def held(self, actor_id: str, lease_id: str) -> Group | None:
        """The group that the actor works on under this lease, if it still does."""
        group = self._groups.get(lease_id.rpartition(":")[0])
        if (
            group is None
            or group.state is not GroupState.LEASED
            or (group.actor_id, group.lease_id) != (actor_id, lease_id)
        ):
            return None
        return group

    def renew(self, actor_id: str, lease_ids: Iterable[str], now: float) -> list[str]:
        """Extends the actor's leases and returns those that it no longer holds and must cancel."""
        lost = []
        for lease_id in lease_ids:
            group = self.held(actor_id, lease_id)
            if group is None:
                lost.append(lease_id)
            else:
                group.expires_at = now + self.lease_s
        return lost

    def of_older_sessions(self, actor_id: str, session_id: str, now: float) -> list[Group]:
        """Notes a call of an actor; returns the groups that its older sessions still hold."""
        if not self.sessions.seen(actor_id, session_id, now):
            return []
        leased = self._groups.within(GroupState.LEASED)
        return [
            group
            for group in leased
            if group.actor_id == actor_id and group.session_id != session_id
        ]

    def expired(self, now: float) -> list[Group]:
        """Groups whose lease was not renewed in time."""
        self.sessions.forget_silent(now)
        return [
            group for group in self._groups.within(GroupState.LEASED) if group.expires_at <= now
        ]

    def revoke(self, leases: Iterable[GroupLease]) -> list[Group]:
        """Takes back leases that no actor has received, so they do not count as attempts."""
        revoked = []
        for lease in leases:
            group = self._groups.get(lease.group_id)
            if group and group.state is GroupState.LEASED and group.lease_id == lease.lease_id:
                revoked.append(group)
        for group in revoked:
            self._groups.move(group, GroupState.WAITING)
            group.attempt -= 1
        return revoked
