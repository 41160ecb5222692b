"""The ledger: which groups exist and what becomes of each. A pure state machine; the clock is passed in.

    grant -> LEASED --arrived--> ARRIVED --ready--> READY --take--> TAKEN --commit--> trained
               |  ^                 |                 |
      expired, |  | grant           +--- drop --------+--> ended, its slot comes back to the policy
   handed back v  |
             WAITING

Invariants: a group ends exactly once; ids are never reused; the policy holds exactly the groups that are neither taken nor
ended; memory grows with outstanding groups only.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum

from pipelinerl_common.errors import PermanentError, Refused, Unavailable
from pipelinerl_common.types import GroupId
from pipelinerl_preprocessor.groups import Group, GroupState, LedgerState, Lease, Snapshot, make_group_id, split_group_id
from pipelinerl_preprocessor.sessions import Sessions
from pipelinerl_staleness.policy import Policy, Take


class Arrival(Enum):
    """What the ledger makes of a group's message."""

    ACCEPTED = "accepted"
    REDELIVERED = "redelivered"
    """The very message that is already being handled: only its delivery handle is new."""
    TRAINED = "trained"
    """Part of the last commit, whose acknowledgement was lost."""
    DUPLICATE = "duplicate"
    ROLLBACK = "rollback"
    UNKNOWN = "unknown"


class Ledger:
    """Owns the staleness policy and every outstanding group. Keys of groups whose record changed go to `on_change`."""

    def __init__(
        self, policy: Policy, *, lease_s: float, max_attempts: int, on_change: Callable[[GroupId | None], None] = lambda _: None
    ) -> None:
        self.policy = policy
        self.lease_s = lease_s
        self.max_attempts = max_attempts
        self.state = LedgerState()
        self._groups: dict[GroupId, Group] = {}
        self._ready: dict[GroupId, None] = {}
        self._taken: tuple[GroupId, ...] = ()
        self._waiting: dict[GroupId, None] = {}
        self.sessions = Sessions(forget_s=10 * lease_s)
        self._on_change = on_change

    # Questions

    @property
    def restored(self) -> bool:
        return self.state.incarnation >= 0

    @property
    def batch(self) -> tuple[GroupId, ...]:
        """Groups of the batch that is taken and not committed; empty between steps."""
        return self._taken

    @property
    def groups(self) -> Mapping[GroupId, Group]:
        """Outstanding groups in dispatch order."""
        return self._groups

    def count(self, *states: GroupState) -> int:
        return sum(group.state in states for group in self._groups.values())

    def may_grant(self) -> bool:
        """Whether a lease can be granted now."""
        if not self.restored or not self.state.publishing or self.state.done:
            return False
        return bool(self._waiting) or self.policy.may_admit()

    def snapshot(self) -> Snapshot:
        open_prompts = sorted({*self.state.open_prompts, *(group.prompt_index for group in self._groups.values())})
        return Snapshot(self.state.num_committed, self.state.next_prompt_index, tuple(open_prompts), self.state.incarnation)

    # Leases

    def heard_of(self, actor_id: str, session_id: str, now: float) -> list[GroupId]:
        """An actor calls: the leases of its older sessions are taken back. Returns the groups given up with them."""
        if not self.sessions.heard_of(actor_id, session_id, now):
            return []
        return self._take_back(g for g in self._leased() if g.actor_id == actor_id and g.session_id != session_id)

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

    def grant(self, actor_id: str, session_id: str, max_groups: int, now: float) -> list[Lease]:
        """Leases of up to `max_groups` groups: those that wait to be granted again first, then open prompts, then new ones."""
        leases: list[Lease] = []
        while len(leases) < max_groups and self.may_grant():
            group = self._next_waiting() or self._admit()
            self._waiting.pop(group.group_id, None)
            group.state = GroupState.LEASED
            group.attempt += 1
            group.actor_id, group.session_id = actor_id, session_id
            group.expires_at = now + self.lease_s
            self._on_change(group.group_id)
            leases.append(Lease(group.lease_id, group.group_id, group.attempt, group.prompt_index))
        return leases

    def started(self, actor_id: str, lease_id: str, version: int) -> None:
        group = self.held(actor_id, lease_id)
        if group is not None and group.started_version != version:
            group.started_version = version
            self.policy.started(group.group_id, version)
            self._on_change(group.group_id)

    def hand_back(self, actor_id: str, lease_id: str) -> list[GroupId]:
        """The actor stops working on a lease. Returns the group when it is given up because this was its last attempt."""
        group = self.held(actor_id, lease_id)
        return self._take_back([group] if group else [])

    def expire(self, now: float) -> list[GroupId]:
        """Takes back leases that were not renewed. Returns the groups given up because this was their last attempt."""
        self.sessions.forget_silent(now)
        return self._take_back(group for group in self._leased() if group.expires_at <= now)

    def held(self, actor_id: str, lease_id: str) -> Group | None:
        """The group that the actor works on under this lease, if it still does."""
        group = self._groups.get(GroupId(lease_id.rpartition(":")[0]))
        held = (
            group is not None and group.state is GroupState.LEASED and group.lease_id == lease_id and group.actor_id == actor_id
        )
        return group if held else None

    # Results

    def arrive(self, group_id: GroupId, attempt: int) -> Arrival:
        """A group's message came. ACCEPTED moves it to ARRIVED, whatever attempt it is, and ends its lease."""
        identity = split_group_id(group_id)
        if identity is None or identity[0] > self.state.incarnation:
            return Arrival.UNKNOWN
        incarnation, sequence = identity
        if incarnation < self.state.incarnation:
            return Arrival.ROLLBACK
        group = self._groups.get(group_id)
        if group is None:
            if sequence >= self.state.next_sequence:
                return Arrival.UNKNOWN
            return Arrival.TRAINED if sequence in self.state.last_commit else Arrival.DUPLICATE
        if group.state in (GroupState.LEASED, GroupState.WAITING):
            self._waiting.pop(group_id, None)
            group.state = GroupState.ARRIVED
            group.arrived_attempt = attempt
            return Arrival.ACCEPTED
        return Arrival.REDELIVERED if attempt == group.arrived_attempt else Arrival.DUPLICATE

    def ready(self, group_id: GroupId, first_versions: Sequence[int], last_versions: Sequence[int]) -> bool:
        """An ARRIVED group passed every check. The versions are those of each trajectory's first and last sampled token.
        False when the group has ended in the meantime."""
        group = self._groups.get(group_id)
        if group is None or group.state is not GroupState.ARRIVED:
            return False
        group.state = GroupState.READY
        group.first_versions, group.last_versions = tuple(first_versions), tuple(last_versions)
        self._ready[group_id] = None
        self._tell_finished(group)
        return True

    def drop(self, group_id: GroupId) -> bool:
        """Ends a group without training it; its slot comes back. False when it has ended already or is in the batch."""
        group = self._groups.get(group_id)
        if group is None or group.state is GroupState.TAKEN:
            return False
        self._end(group_id)
        self.policy.lost(group_id)
        return True

    # Steps

    def take(self) -> Take:
        """Asks the policy for the batch of the next step. Groups that it drops have ended."""
        if self._taken:
            raise Refused(f"step {self.state.num_committed} has a batch already")
        take = self.policy.take(self.state.num_committed)
        for dropped in take.dropped:
            self._end(GroupId(dropped))
        self._taken = tuple(GroupId(group) for group in take.groups)
        for group_id in self._taken:
            self._groups[group_id].state = GroupState.TAKEN
            self._ready.pop(group_id, None)
        if self._taken:
            self.policy.step_begun(self.state.num_committed)
        return take

    def commit(self, step: int, group_ids: Sequence[str], *, last: bool) -> bool:
        """Step `step` trained on these groups: they end. False when exactly this was committed before.

        Right also for groups that were taken before a restart and have not been delivered again since.
        Raises Refused for another step or unknown groups, PermanentError for an empty or repeated list.
        """
        self._check_restored()
        if not group_ids or len(set(group_ids)) != len(group_ids):
            raise PermanentError(f"CommitStep: group_ids must name each group of step {step} once, got {list(group_ids)[:8]}")
        if step == self.state.num_committed - 1 and self._is_last_commit(group_ids):
            return False
        if step != self.state.num_committed:
            raise Refused(f"CommitStep: step {step} cannot be committed, the next one is {self.state.num_committed}")
        unknown = [group_id for group_id in group_ids if group_id not in self._groups]
        if unknown:
            raise Refused(f"CommitStep: step {step} names group {unknown[0]}, which does not exist or has ended already")
        trained = tuple(GroupId(group_id) for group_id in group_ids)
        as_taken = set(trained) == set(self._taken)
        for group_id in self._taken:
            self._groups[group_id].state = GroupState.READY
        sequences = [self._groups[group_id].sequence for group_id in trained]
        for group_id in trained:
            self._end(group_id)
        self.state.num_committed = step + 1
        self.state.last_commit = tuple(sequences)
        self.state.done = last
        self._ready |= dict.fromkeys(group_id for group_id in self._taken if group_id in self._groups)
        self._taken = ()
        if not as_taken:
            self._rebuild_policy()
        self.policy.step_done(step)
        self._on_change(None)
        return True

    def publish(self, version: int) -> list[GroupId]:
        """The generators serve `version` now. Returns running or waiting groups that the policy gave up; they have ended."""
        self._check_restored()
        if version < 0 or version > self.state.num_committed + 1:
            raise Refused(
                f"MarkPublished: version {version} cannot exist when {self.state.num_committed} steps are committed: "
                "restore first after a rollback"
            )
        if self.state.publishing and version <= self.state.served_version:
            return []
        self.state.served_version, self.state.publishing = version, True
        cancelled = [GroupId(group) for group in self.policy.published(version)]
        if self.policy.requeues_cancelled:
            self.state.open_prompts.extend(self._groups[group_id].prompt_index for group_id in cancelled)
        for group_id in cancelled:
            self._end(group_id)
        self._on_change(None)
        return cancelled

    # Restoring

    def restore(self, restore_id: str, num_committed: int, snapshot: Snapshot | None) -> list[GroupId]:
        """Rewinds to `snapshot`, or starts afresh without one; `state.rewound` tells whether anything changed.

        Returns the groups that became void; their ids are never used again. Raises PermanentError for a contradiction.
        """
        if not restore_id:
            raise PermanentError("Restore: restore_id is empty: it must be unique to the trainer's start")
        if num_committed != (snapshot.num_committed_steps if snapshot else 0):
            expected = snapshot.num_committed_steps if snapshot else 0
            raise PermanentError(f"Restore: num_committed_steps={num_committed} but the snapshot is of step {expected}")
        if restore_id == self.state.restore_id and self.restored:
            return []
        here = snapshot is not None and (snapshot.incarnation, num_committed) == (
            self.state.incarnation,
            self.state.num_committed,
        )
        if here:
            self.state = replace(self.state, restore_id=restore_id, rewound=False, publishing=False, done=False)
            self._on_change(None)
            return []
        start = snapshot or Snapshot(0, 0, (), -1)
        void = list(self._groups)
        self._groups.clear()
        self._ready.clear()
        self._waiting.clear()
        self._taken = ()
        self.state = LedgerState(
            incarnation=max(self.state.incarnation, start.incarnation) + 1,
            next_prompt_index=start.next_prompt_index,
            open_prompts=list(start.open_prompt_indices),
            num_committed=num_committed,
            restore_id=restore_id,
            rewound=True,
        )
        self.policy.recover(num_committed, num_committed)
        for group_id in void:
            self._on_change(group_id)
        self._on_change(None)
        return void

    def recover(self, state: LedgerState, groups: Iterable[Group], now: float) -> None:
        """Goes on after a crash from journalled records. Leases live on for `lease_s` from `now`; messages of finished groups
        are delivered again and arrive anew."""
        self.state = state
        committed = {make_group_id(state.incarnation, sequence) for sequence in state.last_commit}
        current = (group for group in groups if split_group_id(group.group_id) == (state.incarnation, group.sequence))
        alive = sorted((group for group in current if group.group_id not in committed), key=lambda group: group.sequence)
        for group in alive:
            group.state, group.expires_at = GroupState.LEASED, now + self.lease_s
            self.sessions.heard_of(group.actor_id, group.session_id, now)
        self._groups = {group.group_id: group for group in alive}
        self._reopen_lost_prompts()
        self._rebuild_policy()

    # Inside

    def _reopen_lost_prompts(self) -> None:
        """Groups are journalled before the ledger's own record, so a crash in between leaves groups beyond the cursor, and
        gaps where a lease was never granted."""
        groups = self._groups.values()
        self.state.next_sequence = max([self.state.next_sequence, *(group.sequence + 1 for group in groups)])
        recorded = {group.prompt_index for group in groups}
        cursor = max([self.state.next_prompt_index, *(prompt + 1 for prompt in recorded)])
        gaps = [prompt for prompt in range(self.state.next_prompt_index, cursor) if prompt not in recorded]
        self.state.open_prompts = [prompt for prompt in self.state.open_prompts if prompt not in recorded] + gaps
        self.state.next_prompt_index = cursor

    def _rebuild_policy(self) -> None:
        self.policy.recover(self.state.num_committed, max(self.state.served_version, 0))
        for group in self._groups.values():
            self.policy.admitted(group.group_id)
            if group.started_version >= 0:
                self.policy.started(group.group_id, group.started_version)
        for group_id in self._ready:
            self._tell_finished(self._groups[group_id])

    def _tell_finished(self, group: Group) -> None:
        for version in group.first_versions:
            self.policy.first_token(group.group_id, version)
        for version in group.last_versions:
            self.policy.last_token(group.group_id, version)
        self.policy.finished(group.group_id)

    def _admit(self) -> Group:
        if self.state.open_prompts:
            prompt_index = self.state.open_prompts.pop(0)
        else:
            prompt_index = self.state.next_prompt_index
            self.state.next_prompt_index += 1
        sequence = self.state.next_sequence
        self.state.next_sequence += 1
        group = Group(make_group_id(self.state.incarnation, sequence), sequence, prompt_index)
        self._groups[group.group_id] = group
        self.policy.admitted(group.group_id)
        self._on_change(None)
        return group

    def _take_back(self, groups: Iterable[Group]) -> list[GroupId]:
        """Lets groups wait for their next attempt; those without one are dropped and returned."""
        given_up = []
        for group in list(groups):
            group.state = GroupState.WAITING
            self._waiting[group.group_id] = None
            if group.attempt + 1 >= self.max_attempts:
                self.drop(group.group_id)
                given_up.append(group.group_id)
        return given_up

    def _end(self, group_id: GroupId) -> None:
        del self._groups[group_id]
        self._ready.pop(group_id, None)
        self._waiting.pop(group_id, None)
        self._on_change(group_id)

    def _leased(self) -> Iterator[Group]:
        return (group for group in self._groups.values() if group.state is GroupState.LEASED)

    def _next_waiting(self) -> Group | None:
        """The earliest dispatched of the groups to be granted again."""
        return min((self._groups[group_id] for group_id in self._waiting), key=lambda group: group.sequence, default=None)

    def _is_last_commit(self, group_ids: Sequence[str]) -> bool:
        return set(group_ids) == {make_group_id(self.state.incarnation, sequence) for sequence in self.state.last_commit}

    def _check_restored(self) -> None:
        if not self.restored:
            raise Unavailable("the ledger waits for the trainer's Restore")
