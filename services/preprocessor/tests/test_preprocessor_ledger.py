"""The ledger under random events, crashes and rewinds included: nothing is lost, trained twice, or
leaked.
"""

import copy
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipelinerl_common.errors import PermanentError, Refused, Unavailable
from pipelinerl_common.types import GroupId
from pipelinerl_preprocessor.groups import (
    Arrival,
    Group,
    GroupLease,
    GroupState,
    LedgerSnapshot,
    LedgerState,
    make_group_id,
    split_group_id,
)
from pipelinerl_preprocessor.ledger import Ledger
from pipelinerl_staleness.areal import Areal, ArealSettings
from pipelinerl_staleness.conventional import Conventional, ConventionalSettings
from pipelinerl_staleness.policy import Policy

LEASE_S = 10.0
MAX_ATTEMPTS = 3
B = 2


def make_ledger(policy: Policy | None = None) -> Ledger:
    return Ledger(
        policy or Areal(ArealSettings(eta=1), B), lease_s=LEASE_S, max_attempts=MAX_ATTEMPTS
    )


def running_ledger(policy: Policy | None = None) -> Ledger:
    ledger = make_ledger(policy)
    ledger.restore("start", 0, None)
    ledger.publish(0)
    return ledger


def finish(ledger: Ledger, group_id: str) -> None:
    assert ledger.arrive(group_id) is Arrival.ACCEPTED
    assert ledger.ready(group_id, [0], [0])


def take(ledger: Ledger) -> tuple[str, ...]:
    return ledger.take().groups


def test_leases_of_waiting_groups_come_before_open_prompts_before_new_ones() -> None:
    ledger = make_ledger()
    ledger.restore("r", 3, LedgerSnapshot(3, 10, (4, 7), 0))
    ledger.publish(3)
    [first] = ledger.grant("a", "s", 1, now=0.0)
    assert (first.group_id, first.prompt_index, first.attempt, first.lease_id) == (
        "1-0",
        4,
        0,
        "1-0:0",
    )
    ledger.hand_back("a", first.lease_id)
    again, second, third, fourth = ledger.grant("a", "s", 9, now=0.0)
    assert (again.group_id, again.attempt) == ("1-0", 1)
    assert [second.prompt_index, third.prompt_index, fourth.prompt_index] == [7, 10, 11]


def test_nothing_happens_before_a_restore() -> None:
    ledger = make_ledger()
    assert not ledger.may_grant()
    for call in (
        ledger.take,
        ledger.snapshot,
        lambda: ledger.publish(0),
        lambda: ledger.commit(0, ["0-0"], last=False),
    ):
        with pytest.raises(Unavailable):
            call()


def test_a_lease_that_is_renewed_does_not_expire() -> None:
    ledger = running_ledger()
    [lease] = ledger.grant("a", "s", 1, now=0.0)
    assert ledger.leases.renew("a", [lease.lease_id, "0-9:0", "junk"], now=9.0) == ["0-9:0", "junk"]
    ledger.expire(now=18.9)
    assert ledger.leases.held("a", lease.lease_id) is not None
    ledger.expire(now=19.0)
    assert ledger.leases.held("a", lease.lease_id) is None
    assert ledger.leases.renew("a", [lease.lease_id], now=19.0) == [lease.lease_id]


def test_the_last_attempt_gives_the_group_up_and_its_slot_back() -> None:
    ledger = running_ledger()
    ledger.grant("a", "s", 4, now=0.0)
    for attempt in range(1, MAX_ATTEMPTS):
        assert ledger.expire(now=attempt * LEASE_S) == []
        assert len(ledger.grant("a", "s", 9, now=attempt * LEASE_S)) == 4
    assert ledger.expire(now=MAX_ATTEMPTS * LEASE_S) == ["0-0", "0-1", "0-2", "0-3"]
    assert [lease.prompt_index for lease in ledger.grant("a", "s", 9, now=30.0)] == [4, 5, 6, 7]


def test_revoked_leases_are_no_attempts() -> None:
    ledger = running_ledger()
    leases = ledger.grant("a", "s", 2, now=0.0)
    ledger.revoke(leases)
    assert ledger.grant("a", "s", 2, now=0.0) == leases


def test_the_first_result_counts_whatever_its_attempt() -> None:
    ledger = running_ledger()
    [old] = ledger.grant("silent", "s", 1, now=0.0)
    ledger.expire(now=LEASE_S)
    [new] = ledger.grant("a", "s", 1, now=LEASE_S)
    assert (new.group_id, new.attempt) == (old.group_id, 1)
    assert ledger.arrive(old.group_id) is Arrival.ACCEPTED
    assert ledger.leases.renew("a", [new.lease_id], now=LEASE_S) == [new.lease_id]
    assert ledger.arrive(new.group_id) is Arrival.DUPLICATE


def test_messages_are_told_apart_by_their_ids() -> None:
    ledger = running_ledger()
    ledger.restore("again", 0, None)
    ledger.publish(0)
    ledger.grant("a", "s", 4, now=0.0)
    assert ledger.arrive("0-0") is Arrival.ROLLBACK
    assert [ledger.arrive(text) for text in ("1-4", "2-0", "", "x", "1-", "-1", "1-0-0")] == [
        Arrival.UNKNOWN
    ] * 7
    finish(ledger, "1-0")
    finish(ledger, "1-1")
    ledger.commit(0, take(ledger), last=False)
    assert ledger.arrive("1-0") is Arrival.TRAINED
    ledger.drop("1-2")
    assert ledger.arrive("1-2") is Arrival.DUPLICATE


class Aborting(Areal):
    def published(self, version: int) -> tuple[str, ...]:
        super().published(version)
        running = tuple(self.groups.running)
        for group in running:
            self.lost(group)
        return running


def test_cancelled_groups_are_given_up() -> None:
    ledger = running_ledger(Aborting(ArealSettings(eta=1), B))
    ledger.grant("a", "s", 4, now=0.0)
    assert ledger.publish(1) == ["0-0", "0-1", "0-2", "0-3"]
    assert [lease.prompt_index for lease in ledger.grant("a", "s", 4, now=0.0)] == [4, 5, 6, 7]


def test_a_group_that_is_handed_back_goes_on_from_its_tokens_until_it_arrives() -> None:
    ledger = running_ledger()
    (lease,) = ledger.grant("a", "s", 1, now=0.0)
    ledger.hand_back("a", lease.lease_id, b"sampled")
    (second,) = ledger.grant("b", "t", 1, now=0.0)
    assert (second.group_id, second.attempt, second.partial) == (lease.group_id, 1, b"sampled")
    ledger.arrive(lease.group_id)
    group = ledger.groups.get(lease.group_id)
    assert group is not None
    assert group.partial == b""


def test_the_policy_limit_of_trajectories_is_shared_among_the_actors() -> None:
    class Limited(Areal):
        def trajectory_limit(self) -> int:
            return 7

    ledger = running_ledger(Limited(ArealSettings(eta=1), B))
    assert running_ledger().trajectory_limit("a") is None
    for actor in "abc":
        ledger.actor_seen(actor, "s", now=0.0)
    assert [ledger.trajectory_limit(actor) for actor in "abc"] == [3, 2, 2]
    for actor in "defghij":
        ledger.actor_seen(actor, "s", now=0.0)
    assert ledger.trajectory_limit("j") == 1


def test_a_restore_without_snapshot_always_starts_afresh_and_an_id_counts_once() -> None:
    ledger = running_ledger()
    ledger.grant("a", "s", 1, now=0.0)
    assert ledger.restore("start", 0, None) == []
    assert ledger.state.incarnation == 0
    assert ledger.restore("other", 0, None) == ["0-0"]
    assert ledger.state.incarnation == 1
    assert ledger.state.rewound


def test_groups_of_an_assembly_that_was_not_trained_wait_again() -> None:
    ledger = running_ledger()
    ledger.grant("a", "s", 4, now=0.0)
    for group_id in ("0-0", "0-1", "0-2", "0-3"):
        finish(ledger, group_id)
    assert take(ledger) == ("0-0", "0-1")
    assert [group.group_id for group in ledger.commit(0, ["0-2", "0-1"], last=False)] == [
        "0-2",
        "0-1",
    ]
    assert take(ledger) == ("0-0", "0-3")


def test_refusals() -> None:
    ledger = running_ledger()
    with pytest.raises(PermanentError, match="restore_id"):
        ledger.restore("", 0, None)
    ledger.grant("a", "s", 2, now=0.0)
    finish(ledger, "0-0")
    finish(ledger, "0-1")
    take(ledger)
    with pytest.raises(Refused, match="has a batch"):
        ledger.take()
    assert not ledger.drop("0-0"), "a group of the batch cannot be dropped"
    with pytest.raises(PermanentError, match="every group once"):
        ledger.commit(0, ["0-0", "0-0"], last=False)


@dataclass
class Store:
    """A journal that is written at once: what a crash leaves."""

    state: LedgerState = field(default_factory=LedgerState)
    groups: dict[GroupId, Group] = field(default_factory=dict)

    def attach(self, ledger: Ledger) -> None:
        def on_change(group_id: GroupId | None) -> None:
            if group_id is not None:
                group = ledger.groups.get(group_id)
                if group is None:
                    self.groups.pop(group_id, None)
                else:
                    self.groups[group_id] = copy.copy(group)
            self.state = copy.deepcopy(ledger.state)

        ledger.on_change = on_change


class LedgerMachine(RuleBasedStateMachine):
    """Actors, stream and trainer around one ledger. `stream` holds unacknowledged messages in their
    order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.policy_kind = 0
        self.now = 0.0
        self.store = Store()
        self.ledger = self.new_ledger()
        self.leases: list[tuple[str, GroupLease]] = []
        self.stream: list[str] = []
        self.trained: list[list[int]] = []
        self.checkpoints: list[tuple[LedgerSnapshot, int]] = []
        self.prompt_of: dict[str, int] = {}
        self.num_restores = 0
        self.restore(None)

    def new_ledger(self) -> Ledger:
        policies = (
            Areal(ArealSettings(eta=1), B),
            Conventional(ConventionalSettings(steps_per_generation=2), B),
        )
        ledger = make_ledger(policies[self.policy_kind])
        self.store.attach(ledger)
        return ledger

    def restore(self, snapshot: LedgerSnapshot | None) -> None:
        self.num_restores += 1
        step = snapshot.num_committed_steps if snapshot else 0
        self.ledger.restore(f"restore-{self.num_restores}", step, snapshot)
        del self.trained[step:]
        self.checkpoints = [
            each for each in self.checkpoints if each[0].num_committed_steps <= step
        ]
        if self.ledger.state.rewound:
            self.stream.clear()
            self.checkpoints = [
                each for each in self.checkpoints if snapshot and each[0] == snapshot
            ]
        self.ledger.publish(step)

    @rule(actor=st.sampled_from(["a", "b"]), num=st.integers(1, 4))
    def lease(self, actor: str, num: int) -> None:
        for lease in self.ledger.grant(actor, f"session-of-{actor}", num, self.now):
            self.leases.append((actor, lease))
            assert (
                self.prompt_of.setdefault(lease.group_id, lease.prompt_index) == lease.prompt_index
            )

    @precondition(lambda self: self.leases)
    @rule(place=st.integers(0, 99), new=st.booleans())
    def publish_result(self, place: int, new: bool) -> None:
        """Any lease ever granted may still be answered, more than once."""
        _, lease = self.leases[place % len(self.leases)]
        arrival = self.ledger.arrive(lease.group_id)
        if arrival is Arrival.ACCEPTED:
            self.stream.append(lease.group_id)
            assert self.ledger.ready(lease.group_id, [0], [0])
        self.leases = self.leases[-12:]
        del new

    @precondition(lambda self: self.leases)
    @rule(place=st.integers(0, 99), outcome=st.sampled_from(["failed", "handed_back", "started"]))
    def report(self, place: int, outcome: str) -> None:
        actor, lease = self.leases[place % len(self.leases)]
        if outcome == "started":
            self.ledger.started(actor, lease.lease_id, self.ledger.state.served_version)
        elif outcome == "handed_back":
            self.ledger.hand_back(actor, lease.lease_id)
        elif self.ledger.leases.held(actor, lease.lease_id):
            self.ledger.drop(lease.group_id)

    @rule(seconds=st.sampled_from([1.0, LEASE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.ledger.expire(self.now)

    @precondition(lambda self: self.stream)
    @rule()
    def ring_buffer_overflows(self) -> None:
        if self.ledger.drop(self.stream[0]):
            self.stream.pop(0)

    @rule(crash=st.booleans(), checkpoint=st.booleans())
    def train(self, crash: bool, checkpoint: bool) -> None:
        step = self.ledger.state.num_committed
        batch = self.ledger.batch or self.ledger.take().groups
        if not batch:
            return
        assert len(batch) == B
        if crash:
            self.crash(redelivered=0)
        trained = self.ledger.commit(step, batch, last=False)
        self.trained.append([group.prompt_index for group in trained])
        assert self.ledger.commit(step, batch, last=False) == []
        self.stream = [group_id for group_id in self.stream if group_id not in batch]
        if crash:
            self.redeliver()
        if checkpoint:
            self.checkpoints.append((self.ledger.snapshot(), len(self.trained)))

    @rule(skip=st.booleans())
    def publish(self, skip: bool) -> None:
        if not skip:
            assert self.ledger.publish(self.ledger.state.num_committed) == []
            assert self.ledger.publish(self.ledger.state.num_committed) == []

    @rule(redelivered=st.integers(0, 9))
    def crash(self, redelivered: int) -> None:
        """kill -9: a new ledger from the journal, then the unacknowledged messages again."""
        before = self.ledger
        self.ledger = self.new_ledger()
        self.ledger.recover(
            self.store.state, [copy.copy(group) for group in self.store.groups.values()], self.now
        )
        assert self.ledger.snapshot() == before.snapshot()
        if redelivered:
            self.redeliver()
            assert [g.group_id for g in self.ledger.groups] == [g.group_id for g in before.groups]

    def redeliver(self) -> None:
        for group_id in self.stream:
            if self.ledger.arrive(group_id) is Arrival.ACCEPTED:
                self.ledger.ready(group_id, [0], [0])

    @precondition(lambda self: self.checkpoints)
    @rule(place=st.integers(0, 9))
    def trainer_restarts(self, place: int) -> None:
        snapshot, _ = self.checkpoints[place % len(self.checkpoints)]
        self.restore(snapshot)

    @invariant()
    def every_prompt_is_open_or_ended(self) -> None:
        """Nothing is trained twice in one timeline, and what is open has not been trained."""
        trained = [prompt for step in self.trained for prompt in step]
        assert len(trained) == len(set(trained))
        snapshot = self.ledger.snapshot()
        assert not set(trained) & set(snapshot.open_prompt_indices)
        assert all(
            prompt < snapshot.next_prompt_index
            for prompt in [*trained, *snapshot.open_prompt_indices]
        )
        assert len(snapshot.open_prompt_indices) == len(self.ledger.groups) + len(
            self.ledger.state.open_prompts
        )

    @invariant()
    def policy_and_ledger_agree(self) -> None:
        expected = {
            group.group_id for group in self.ledger.groups if group.state is not GroupState.TAKEN
        }
        assert set(self.ledger.policy.outstanding()) == expected
        assert len(self.ledger.groups) <= self.ledger.policy.max_outstanding() + B

    @invariant()
    def journal_has_what_is_outstanding(self) -> None:
        assert set(self.store.groups) == {group.group_id for group in self.ledger.groups}
        assert self.store.state == self.ledger.state


class ConventionalMachine(LedgerMachine):
    def new_ledger(self) -> Ledger:
        self.policy_kind = 1
        return super().new_ledger()


LedgerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
ConventionalMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None
)
TestLedgerWithAreal = LedgerMachine.TestCase
TestLedgerWithConventional = ConventionalMachine.TestCase


def test_group_ids_round_trip() -> None:
    assert split_group_id(make_group_id(3, 17)) == (3, 17)
    assert split_group_id("3-x") is None


def test_a_crash_inside_a_lease_loses_no_prompt() -> None:
    """Only the second of three groups was journalled, and not the ledger's own record."""
    state = LedgerState(
        incarnation=0, next_sequence=5, next_prompt_index=5, publishing=True, served_version=0
    )
    ledger = make_ledger()
    ledger.recover(
        state, [Group(GroupId("0-6"), 6, 6, attempt=0, actor_id="a", session_id="s")], now=0.0
    )
    assert ledger.snapshot().open_prompt_indices == (5, 6)
    [lease] = ledger.grant("a", "s", 1, now=0.0)
    assert (lease.group_id, lease.prompt_index) == ("0-7", 5)


def test_records_of_ended_groups_are_passed_over() -> None:
    state = LedgerState(
        incarnation=1,
        next_sequence=3,
        next_prompt_index=3,
        num_committed=1,
        last_commit=(0, 1),
        publishing=True,
        served_version=1,
    )
    records = [
        Group(GroupId(text), sequence, sequence, attempt=0)
        for text, sequence in (("0-7", 7), ("1-0", 0), ("1-2", 2))
    ]
    ledger = make_ledger()
    ledger.recover(state, records, now=0.0)
    assert [group.group_id for group in ledger.groups] == ["1-2"]


def test_the_same_records_and_messages_give_the_same_decisions() -> None:
    ledger = running_ledger()
    store = Store()
    store.attach(ledger)
    ledger.grant("a", "s", 4, now=0.0)
    for group_id in ("0-3", "0-1", "0-2"):
        finish(ledger, group_id)
    recovered = make_ledger()
    recovered.recover(store.state, store.groups.values(), now=0.0)
    for group_id in ("0-3", "0-1", "0-2"):
        finish(recovered, group_id)
    assert take(recovered) == take(ledger) == ("0-1", "0-2")
    assert recovered.may_grant() == ledger.may_grant()
