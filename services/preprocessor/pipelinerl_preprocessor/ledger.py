"""The ledger: which groups exist and the state of each. A pure state machine; the clock is passed
in.

    grant -> LEASED --arrive--> ARRIVED --ready--> READY --take--> TAKEN --commit--> trained
              |  ^                 |                 |
      expired,|  | grant           +--- drop --------+--> ended; its slot returns to the policy
  handed back v  |
            WAITING

Invariants: a group ends exactly once; ids are never used again; the policy holds exactly the groups
that are neither taken nor ended; memory grows with outstanding groups only.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from pipelinerl_common.errors import PermanentError, Refused, Unavailable
from pipelinerl_common.types import GroupId
from pipelinerl_preprocessor.groups import (
    UNARRIVED,
    Arrival,
    Group,
    GroupLease,
    GroupState,
    GroupTable,
    LedgerSnapshot,
    LedgerState,
    make_group_id,
    split_group_id,
)
from pipelinerl_preprocessor.leases import Leases
from pipelinerl_staleness.policy import EngineLoad, Policy, Take


class Ledger:
    """The owner of the staleness policy and of every outstanding group.

    `now` is the clock of the groups' `since`. `on_change` receives the group whose record must be
    journalled, or None for the ledger's own record.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        lease_s: float,
        max_attempts: int,
        now: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.policy = policy
        self.max_attempts = max_attempts
        self.state = LedgerState()
        self.groups = GroupTable(now)
        self.leases = Leases(self.groups, lease_s)
        self.on_change: Callable[[GroupId | None], None] = lambda _: None

    @property
    def restored(self) -> bool:
        return self.state.incarnation >= 0

    @property
    def batch(self) -> tuple[GroupId, ...]:
        """Groups of the batch that is taken and not committed, in its order."""
        return tuple(group.group_id for group in self.groups.within(GroupState.TAKEN))

    def snapshot(self) -> LedgerSnapshot:
        self.check_restored()
        open_prompts = sorted(
            {*self.state.open_prompts, *(group.prompt_index for group in self.groups)}
        )
        return LedgerSnapshot(
            self.state.num_committed,
            self.state.next_prompt_index,
            tuple(open_prompts),
            self.state.incarnation,
        )

    def check_restored(self) -> None:
        if not self.restored:
            raise Unavailable("the ledger waits for the trainer's Restore")

    # Leases

    def may_grant(self) -> bool:
        """Whether a lease can be granted now."""
        if not self.restored or not self.state.publishing or self.state.done:
            return False
        return self.groups.count(GroupState.WAITING) > 0 or self.policy.may_admit()

    def actor_seen(self, actor_id: str, session_id: str, now: float) -> list[GroupId]:
        """Notes a call of an actor and takes back the leases of its older sessions. Returns the
        groups given up with them.
        """
        return self._take_back(self.leases.of_older_sessions(actor_id, session_id, now))

    def grant(
        self, actor_id: str, session_id: str, max_groups: int, now: float
    ) -> list[GroupLease]:
        """Leases of up to `max_groups` groups: first those that wait to be granted again, then open
        prompts, then new ones.
        """
        granted: list[GroupLease] = []
        while len(granted) < max_groups and self.may_grant():
            waiting = self.groups.within(GroupState.WAITING)
            group = min(waiting, key=lambda each: each.sequence, default=None) or self._admit()
            granted.append(self.leases.assign(group, actor_id, session_id, now))
            self.on_change(group.group_id)
        return granted

    def revoke(self, leases: Iterable[GroupLease]) -> None:
        """Takes back leases that no actor has received, so they do not count as attempts."""
        for group in self.leases.revoke(leases):
            self.on_change(group.group_id)

    def started(self, actor_id: str, lease_id: str, version: int) -> None:
        """The group's first request runs on a generator that serves `version`."""
        group = self.leases.held(actor_id, lease_id)
        if group is not None and group.started_version != version:
            self.groups.started(group, version)
            self.policy.started(group.group_id, version)
            self.on_change(group.group_id)

    def hand_back(self, actor_id: str, lease_id: str, partial: bytes = b"") -> list[GroupId]:
        """The actor stops working on a lease; the next attempt continues from `partial`. Returns
        the group when it is given up because this was its last attempt.
        """
        group = self.leases.held(actor_id, lease_id)
        if group is not None:
            group.partial = partial
        return self._take_back([group] if group else [])

    def expire(self, now: float) -> list[GroupId]:
        """Takes back leases that were not renewed. Returns the groups given up because this was
        their last attempt.
        """
        return self._take_back(self.leases.expired(now))

    # Results

    def arrive(self, group_id: str) -> Arrival:
        """A group's message has arrived. ACCEPTED moves the group to ARRIVED, whatever attempt sent
        the message, and ends its lease.
        """
        identity = split_group_id(group_id)
        if identity is None or identity[0] > self.state.incarnation:
            return Arrival.UNKNOWN
        incarnation, sequence = identity
        if incarnation < self.state.incarnation:
            return Arrival.ROLLBACK
        group = self.groups.get(group_id)
        if group is None:
            if sequence >= self.state.next_sequence:
                return Arrival.UNKNOWN
            return Arrival.TRAINED if sequence in self.state.last_commit else Arrival.DUPLICATE
        if group.state in UNARRIVED:
            self.groups.move(group, GroupState.ARRIVED)
            group.partial = b""
            return Arrival.ACCEPTED
        return Arrival.DUPLICATE

    def trajectory_limit(self, actor_id: str) -> int | None:
        """The actor's share of the trajectories that the policy lets decode at once: shares are
        even, at least one each.
        """
        limit = self.policy.trajectory_limit()
        if limit is None:
            return None
        actors = self.leases.sessions.actors()
        share, rest = divmod(limit, max(1, len(actors)))
        return max(1, share + (actor_id in actors[:rest]))

    def ready(
        self, group_id: str, first_versions: Sequence[int], last_versions: Sequence[int]
    ) -> bool:
        """An ARRIVED group has passed every check. The versions are those of each trajectory's
        first and last sampled token. False when the group has ended in the meantime.
        """
        group = self.groups.get(group_id)
        if group is None or group.state is not GroupState.ARRIVED:
            return False
        self.groups.move(group, GroupState.READY)
        group.first_versions, group.last_versions = tuple(first_versions), tuple(last_versions)
        self._report_finished(group)
        return True

    def drop(self, group_id: str) -> bool:
        """Ends a group without training it and frees its slot. False when it has ended already or
        is in the batch.
        """
        group = self.groups.get(group_id)
        if group is None or group.state is GroupState.TAKEN:
            return False
        self._end(group)
        self.policy.lost(group_id)
        return True

    # Steps

    def take(self) -> Take:
        """Takes the batch of the next step from the policy. Groups that it drops have ended."""
        self.check_restored()
        step = self.state.num_committed
        if self.groups.count(GroupState.TAKEN):
            raise Refused(f"step {step} has a batch already")
        return self._settle(step, self.policy.take(step))

    def take_next(self) -> Take:
        """Takes the next group of the batch of the next step from a streaming policy. Groups that
        it drops have ended.
        """
        self.check_restored()
        step = self.state.num_committed
        return self._settle(step, self.policy.take_next(step))

    def commit(self, step: int, group_ids: Sequence[str], *, last: bool) -> list[Group]:
        """Ends and returns the groups on which step `step` trained; none when exactly this was
        committed before.

        They need not be TAKEN: after a restart, groups of the batch may not have been redelivered
        yet. Raises Refused for another step or unknown groups, PermanentError for an empty or
        repeating list.
        """
        self.check_restored()
        if not group_ids or len(set(group_ids)) != len(group_ids):
            raise PermanentError(
                f"CommitStep: group_ids of step {step} must name every group once, got "
                f"{list(group_ids)[:8]}"
            )
        if step == self.state.num_committed - 1 and self._is_last_commit(group_ids):
            return []
        if step != self.state.num_committed:
            raise Refused(
                f"CommitStep: step {step} cannot be committed, the next one is "
                f"{self.state.num_committed}"
            )
        unknown = [group_id for group_id in group_ids if self.groups.get(group_id) is None]
        if unknown:
            raise Refused(
                f"CommitStep: step {step} names group {unknown[0]}, which does not exist or has "
                "ended already"
            )
        trained = [self._outstanding(group_id) for group_id in group_ids]
        for group in trained:
            self._end(group)
        others = self.groups.within(GroupState.TAKEN)
        for group in others:
            self.groups.move(group, GroupState.READY)
        # A policy that has not delivered exactly these groups is rebuilt: it must neither hold a
        # trained group nor have lost an untrained one.
        as_taken = not others and all(group.state is GroupState.TAKEN for group in trained)
        self.state.num_committed = step + 1
        self.state.last_commit = tuple(group.sequence for group in trained)
        self.state.done = last
        if not as_taken:
            self._rebuild_policy()
        self.policy.step_done(step)
        self.on_change(None)
        return trained

    def publish(self, version: int) -> list[GroupId]:
        """The generators serve `version` now. Returns the groups that the policy gave up, which
        have ended.
        """
        self.check_restored()
        if not 0 <= version <= self.state.num_committed + 1:
            raise Refused(
                f"MarkPublished: version {version} cannot exist with {self.state.num_committed} "
                "committed steps; "
                "after a rollback call Restore first"
            )
        if self.state.publishing and version <= self.state.served_version:
            return []
        self.state.served_version, self.state.publishing = version, True
        return self._cancel(self.policy.published(version))

    def observe(self, load: EngineLoad) -> list[GroupId]:
        """A load report. Returns the groups that the policy gave up, which have ended."""
        cancelled = self.policy.observe(load)
        return self._cancel(cancelled) if cancelled else []

    # Restarts

    def restore(
        self, restore_id: str, num_committed: int, snapshot: LedgerSnapshot | None
    ) -> list[GroupId]:
        """Rewinds to `snapshot`, or to an empty ledger without one; `state.rewound` says whether
        anything changed.

        Returns the groups that became void; their ids are never used again. Raises PermanentError
        for a contradiction.
        """
        at = snapshot.num_committed_steps if snapshot else 0
        if not restore_id:
            raise PermanentError(
                "Restore: restore_id is empty: it must be unique to each start of the trainer"
            )
        if num_committed != at:
            raise PermanentError(
                f"Restore: num_committed_steps={num_committed} but the snapshot is of step {at}"
            )
        # A repeated call, whose answer was lost, must not rewind what has happened since.
        if restore_id == self.state.restore_id:
            return []
        if snapshot and (snapshot.incarnation, at) == (
            self.state.incarnation,
            self.state.num_committed,
        ):
            self.state = replace(
                self.state, restore_id=restore_id, rewound=False, publishing=False, done=False
            )
            self.on_change(None)
            return []
        void = [group.group_id for group in self.groups]
        self.groups.clear()
        self.state = LedgerState(
            incarnation=max(self.state.incarnation, snapshot.incarnation if snapshot else -1) + 1,
            next_prompt_index=snapshot.next_prompt_index if snapshot else 0,
            open_prompts=list(snapshot.open_prompt_indices) if snapshot else [],
            num_committed=num_committed,
            restore_id=restore_id,
            rewound=True,
        )
        self.policy.recover(num_committed, num_committed)
        for change in (*void, None):
            self.on_change(change)
        return void

    def recover(self, state: LedgerState, groups: Iterable[Group], now: float) -> None:
        """Resumes after a crash from journalled records. Leases last for `lease_s` from `now`;
        messages of finished groups are redelivered and arrive as new. Records of ended groups are
        ignored.
        """
        self.state = state
        ended = {make_group_id(state.incarnation, sequence) for sequence in state.last_commit}
        for group in sorted(groups, key=lambda group: group.sequence):
            if (
                group.group_id == make_group_id(state.incarnation, group.sequence)
                and group.group_id not in ended
            ):
                self.leases.adopt(group, now)
        state.catch_up(self.groups)
        self._rebuild_policy()

    def _rebuild_policy(self) -> None:
        self.policy.recover(self.state.num_committed, max(self.state.served_version, 0))
        for group in self.groups:
            self.policy.admitted(group.group_id)
            if group.started_version >= 0:
                self.policy.started(group.group_id, group.started_version)
        for group in self.groups.within(GroupState.READY):
            self._report_finished(group)

    def _report_finished(self, group: Group) -> None:
        for version in group.first_versions:
            self.policy.first_token(group.group_id, version)
        for version in group.last_versions:
            self.policy.last_token(group.group_id, version)
            self.policy.trajectory_finished(group.group_id)
        self.policy.finished(group.group_id)

    def _admit(self) -> Group:
        sequence = self.state.next_sequence
        self.state.next_sequence += 1
        group = Group(
            make_group_id(self.state.incarnation, sequence), sequence, self.state.next_prompt()
        )
        self.groups.add(group)
        self.policy.admitted(group.group_id)
        self.on_change(None)
        return group

    def _settle(self, step: int, take: Take) -> Take:
        is_first = not self.groups.count(GroupState.TAKEN)
        for group_id in take.dropped:
            self._end(self._outstanding(group_id))
        for group_id in take.groups:
            self.groups.move(self._outstanding(group_id), GroupState.TAKEN)
        if take.groups and is_first:
            self.policy.step_begun(step)
        return take

    def _cancel(self, group_ids: Iterable[str]) -> list[GroupId]:
        """Ends groups that the policy has given up; their prompts are not generated again."""
        cancelled = [self._outstanding(group_id) for group_id in group_ids]
        for group in cancelled:
            self._end(group)
        self.on_change(None)
        return [group.group_id for group in cancelled]

    def _take_back(self, groups: Iterable[Group]) -> list[GroupId]:
        """Makes groups wait for their next attempt; those without one are dropped and returned."""
        given_up = []
        for group in groups:
            self.groups.move(group, GroupState.WAITING)
            if group.attempt + 1 >= self.max_attempts:
                self.drop(group.group_id)
                given_up.append(group.group_id)
        return given_up

    def _end(self, group: Group) -> None:
        self.groups.remove(group)
        self.on_change(group.group_id)

    def _outstanding(self, group_id: str) -> Group:
        group = self.groups.get(group_id)
        if group is None:
            raise KeyError(f"group {group_id} is not outstanding")
        return group

    def _is_last_commit(self, group_ids: Sequence[str]) -> bool:
        return set(group_ids) == {
            make_group_id(self.state.incarnation, sequence) for sequence in self.state.last_commit
        }
