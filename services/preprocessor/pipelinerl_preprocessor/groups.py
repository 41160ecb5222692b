"""The ledger's records: one group, all outstanding groups, the ledger itself; and the reasons for
which a group ends untrained.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from pipelinerl_common.types import GroupId


def make_group_id(incarnation: int, sequence: int) -> GroupId:
    return GroupId(f"{incarnation}-{sequence}")


def split_group_id(group_id: str) -> tuple[int, int] | None:
    """(incarnation, sequence), or None when the text is no group id."""
    incarnation, _, sequence = group_id.partition("-")
    if not (incarnation.isdecimal() and sequence.isdecimal()):
        return None
    return int(incarnation), int(sequence)


class GroupState(Enum):
    """LEASED -> ARRIVED -> READY -> TAKEN -> trained; a lease that ends without a result leads to
    WAITING and a new lease.
    """

    WAITING = "waiting"
    """The group is to be granted again."""
    LEASED = "leased"
    """An actor works on the group."""
    ARRIVED = "arrived"
    """The group's message has arrived and is being checked or scored."""
    READY = "ready"
    """The group waits to be taken."""
    TAKEN = "taken"
    """The group is part of the batch that is being trained."""


UNARRIVED = frozenset({GroupState.WAITING, GroupState.LEASED})
"""The states of a group before its message arrives."""


class Arrival(Enum):
    """The ledger's verdict on a group's message."""

    ACCEPTED = "accepted"
    TRAINED = "trained"
    """The group is part of the last commit, whose acknowledgement was lost."""
    DUPLICATE = "duplicate"
    ROLLBACK = "rollback"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class Group:
    """One outstanding group. Only the ledger changes it."""

    group_id: GroupId
    sequence: int
    prompt_index: int
    state: GroupState = GroupState.WAITING
    attempt: int = -1
    """Number of the newest lease, from 0; -1 before the first."""
    actor_id: str = ""
    session_id: str = ""
    expires_at: float = 0.0
    started_version: int = -1
    """Version that the generator served when the group was started; -1 while unknown."""
    first_versions: tuple[int, ...] = ()
    last_versions: tuple[int, ...] = ()
    since: float = 0.0
    """Time at which the group entered its state, or was started."""
    partial: bytes = b""
    """A PartialGroup that an earlier attempt has handed back. It is only in memory: after a crash
    the group starts from its prompt.
    """
    traceparent: str = ""
    """Trace context of the grant; empty when the group is not traced."""

    @property
    def lease_id(self) -> str:
        return f"{self.group_id}:{self.attempt}"


@dataclass(frozen=True, slots=True)
class GroupLease:
    """One attempt at a group, granted to an actor."""

    lease_id: str
    group_id: GroupId
    attempt: int
    prompt_index: int
    partial: bytes = b""


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """The state from which a run resumes at a checkpoint; see LedgerSnapshot in batches.proto."""

    num_committed_steps: int
    next_prompt_index: int
    open_prompt_indices: tuple[int, ...]
    incarnation: int


@dataclass(slots=True)
class LedgerState:
    """The ledger's own record, without the groups. `incarnation` is -1 before the first restore."""

    incarnation: int = -1
    next_sequence: int = 0
    next_prompt_index: int = 0
    open_prompts: list[int] = field(default_factory=list)
    """Prompts to be granted before those at the cursor."""
    num_committed: int = 0
    last_commit: Sequence[int] = ()
    """Sequences of the groups of the newest committed step."""
    served_version: int = -1
    publishing: bool = False
    """Whether a version was published since the last restore; nothing is granted before."""
    done: bool = False
    restore_id: str = ""
    rewound: bool = False
    """The answer to the last restore."""

    def next_prompt(self) -> int:
        """Takes the first open prompt, or the one at the cursor, which then advances."""
        if self.open_prompts:
            return self.open_prompts.pop(0)
        self.next_prompt_index += 1
        return self.next_prompt_index - 1

    def catch_up(self, groups: Iterable[Group]) -> None:
        """Repairs the cursor after a crash. Groups are journalled before this record, so a crash in
        between leaves groups beyond the cursor, and gaps where a lease was never granted.
        """
        outstanding = list(groups)
        recorded = {group.prompt_index for group in outstanding}
        cursor = max([self.next_prompt_index, *(prompt + 1 for prompt in recorded)])
        gaps = [
            prompt for prompt in range(self.next_prompt_index, cursor) if prompt not in recorded
        ]
        self.open_prompts = [
            prompt for prompt in self.open_prompts if prompt not in recorded
        ] + gaps
        self.next_prompt_index = cursor
        self.next_sequence = max(
            [self.next_sequence, *(group.sequence + 1 for group in outstanding)]
        )


class GroupTable:
    """The outstanding groups in dispatch order, and by state in the order of entering it."""

    def __init__(self, now: Callable[[], float] = lambda: 0.0) -> None:
        self._now = now
        self._groups: dict[GroupId, Group] = {}
        self._by_state: dict[GroupState, dict[GroupId, None]] = {state: {} for state in GroupState}

    def add(self, group: Group) -> None:
        self._groups[group.group_id] = group
        self._by_state[group.state][group.group_id] = None
        group.since = self._now()

    def move(self, group: Group, state: GroupState) -> None:
        del self._by_state[group.state][group.group_id]
        group.state = state
        self._by_state[state][group.group_id] = None
        group.since = self._now()

    def started(self, group: Group, version: int) -> None:
        """Notes that a LEASED group runs on a generator that serves `version`."""
        group.started_version = version
        group.since = self._now()

    def remove(self, group: Group) -> None:
        del self._groups[group.group_id]
        del self._by_state[group.state][group.group_id]

    def clear(self) -> None:
        self._groups.clear()
        for members in self._by_state.values():
            members.clear()

    def get(self, group_id: str) -> Group | None:
        return self._groups.get(GroupId(group_id))

    def within(self, state: GroupState) -> list[Group]:
        return [self._groups[group_id] for group_id in self._by_state[state]]

    def count(self, state: GroupState) -> int:
        return len(self._by_state[state])

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def __len__(self) -> int:
        return len(self._groups)


class DropReason(StrEnum):
    """The label `reason` of `groups_dropped_total`."""

    ROLLBACK = "rollback"
    """The group belongs to a timeline that a restore left."""
    UNKNOWN = "unknown"
    """No such group was ever granted."""
    DUPLICATE = "duplicate"
    """The group has already finished once, under another attempt, or has already ended."""
    MISMATCH = "mismatch"
    """The message contradicts the lease: another prompt, or more samples than the group has."""
    TEMPERATURE = "temperature"
    """The tokens were drawn at another temperature than the job's, so their log-probs cannot be
    trained.
    """
    NON_FINITE = "non_finite"
    """A reward or log-prob is NaN or infinite."""
    BAD_VERSION = "bad_version"
    """A token carries a version that the trainer has not reached, or a negative one."""
    TOO_FEW_SAMPLES = "too_few_samples"
    """Not enough trajectories for the baseline."""
    ZERO_ADVANTAGE = "zero_advantage"
    """All rewards are equal and `dropZeroAdvantage` is set."""
    NO_TOKENS = "no_tokens"
    """Nothing to train: every completion is empty, masked or over-long."""
    REFERENCE = "reference"
    """The reference generators could not score it."""
    RING_BUFFER = "ring_buffer"
    """It waited longest when the ring buffer overflowed."""
    STALE = "stale"
    """The staleness policy dropped it when a batch was assembled (layer 3)."""
    CANCELLED = "cancelled"
    """The staleness policy cancelled it while it ran, by a publish or a load report (layer 2)."""
    UNFINISHED = "unfinished"
    """The run ended while it was generated."""
    EXPIRED = "expired"
    """Its last permitted attempt ended without a result."""
    FAILED = "failed"
    """The actor gave it up."""
