"""What the ledger knows of one group, and of itself."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

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
    """LEASED -> ARRIVED -> READY -> TAKEN -> trained; a lease that ends without a result leads to WAITING and a new lease."""

    WAITING = "waiting"
    """To be granted again."""
    LEASED = "leased"
    """An actor works on it."""
    ARRIVED = "arrived"
    """Its message is here and is being checked or scored."""
    READY = "ready"
    """It waits to be taken."""
    TAKEN = "taken"
    """It is part of the batch that is being trained."""


@dataclass(slots=True)
class Group:
    """One outstanding group. The ledger alone changes it."""

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
    arrived_attempt: int = -1
    """Attempt whose result counts."""
    first_versions: tuple[int, ...] = ()
    last_versions: tuple[int, ...] = ()

    @property
    def lease_id(self) -> str:
        return f"{self.group_id}:{self.attempt}"


@dataclass(frozen=True, slots=True)
class Lease:
    """What an actor is granted."""

    lease_id: str
    group_id: GroupId
    attempt: int
    prompt_index: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Enough to go on from a checkpoint; see LedgerSnapshot in batches.proto."""

    num_committed_steps: int
    next_prompt_index: int
    open_prompt_indices: tuple[int, ...]
    incarnation: int


@dataclass(slots=True)
class LedgerState:
    """The ledger's own record, everything but the groups. `incarnation` is -1 before the first restore."""

    incarnation: int = -1
    next_sequence: int = 0
    next_prompt_index: int = 0
    open_prompts: list[int] = field(default_factory=list)
    """Prompts to be granted before the cursor moves on."""
    num_committed: int = 0
    last_commit: Sequence[int] = ()
    """Sequences of the groups of the newest committed step."""
    served_version: int = -1
    publishing: bool = False
    """Whether a version was published since the last restore; nothing is granted before."""
    done: bool = False
    restore_id: str = ""
    rewound: bool = False
    """What the last restore answered."""
