"""Who is in the weight-transfer group: observations, the group, and the pure decision between them.

Level-triggered: `decide` looks only at what is true now, never at what happened, so no missed event
can leave the group wrong.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 60.0


@dataclass(frozen=True, slots=True)
class SeenGenerator:
    """A generator whose `/health` and `/weights` answered."""

    name: str
    num_workers: int
    epoch: int
    """Of the group that it is in now; 0 for none."""
    served_version: int
    """-1 before the first update."""
    seen_since: float
    """Monotonic seconds since when it has answered without a break."""
    was_away: bool = False
    """It answered before that already: it has come back, and may go again."""


@dataclass(frozen=True, slots=True)
class SeenTrainer:
    epoch: int
    """Of the group that the trainer is in now; 0 for none, as after a restart."""
    policy_version: int = 0


@dataclass(frozen=True, slots=True)
class Observation:
    now: float
    """Monotonic seconds, the clock of every time here."""
    trainer: SeenTrainer | None
    generators: tuple[SeenGenerator, ...]
    num_starting: int = 0
    """Generators that should be there and do not answer."""


@dataclass(frozen=True, slots=True)
class Member:
    """A generator in the group. Its workers have the ranks from `rank_offset` on; the trainer is
    rank 0.
    """

    name: str
    num_workers: int
    rank_offset: int


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """A formed group. Example: members of 2 and 1 workers have the rank offsets 1 and 3; the world
    size is 4.
    """

    epoch: int
    members: tuple[Member, ...]

    @property
    def world_size(self) -> int:
        return 1 + sum(member.num_workers for member in self.members)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.members)


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do, or not yet."""

    reason: str


@dataclass(frozen=True, slots=True)
class Form:
    """Form this group in place of the current one."""

    group: WeightGroup
    reason: str


@dataclass
class MemberBackoff:
    """Generators left out after a failure: 1 s, then twice as long each time, at most 60 s."""

    _failures: dict[str, int] = field(default_factory=dict)
    _until: dict[str, float] = field(default_factory=dict)

    def failed(self, name: str, now: float) -> float:
        """Leaves the generator out for a while, returned in seconds."""
        self._failures[name] = self._failures.get(name, 0) + 1
        delay = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(self._failures[name] - 1, 16))
        self._until[name] = now + delay
        return delay

    def succeeded(self, name: str) -> None:
        self._failures.pop(name, None)
        self._until.pop(name, None)

    def keep_only(self, names: Sequence[str]) -> None:
        """Forgets generators that no longer exist; what bears the name of one that has failed may
        be another process.
        """
        for gone in [name for name in self._failures if name not in names]:
            self.succeeded(gone)

    def is_out(self, name: str, now: float) -> bool:
        return now < self._until.get(name, now)


@dataclass(frozen=True, slots=True)
class Standing:
    """What the coordinator itself knows when it decides."""

    group: WeightGroup | None
    """The last group that formed and was not broken since."""
    transfer_deadline: float | None = None
    """Of the update that is running, if one is."""
    not_before: float = 0.0
    """After a failure that was nobody's in particular: when to try again."""
    settle_s: float = 2.0
    """How long newcomers wait at most for those that are starting, so that they join together; and
    how long one that was away must have stayed, so that one that comes and goes does not form the
    group again and again.
    """
    epoch_floor: int = 0
    """The newest epoch of an earlier coordinator: epochs never go back, not even when everybody has
    forgotten theirs.
    """


def assign_ranks(epoch: int, workers: Mapping[str, int]) -> WeightGroup:
    """Trainer rank 0, then the workers of each generator in the mapping's order."""
    members = []
    offset = 1
    for name, num_workers in workers.items():
        members.append(Member(name, num_workers, offset))
        offset += num_workers
    return WeightGroup(epoch, tuple(members))


def decide(seen: Observation, standing: Standing, backoff: MemberBackoff) -> Wait | Form:
    """What to do now."""
    group = standing.group
    if seen.trainer is None:
        return Wait("the trainer does not answer")
    if standing.transfer_deadline is not None and seen.now < standing.transfer_deadline:
        return Wait("an update is running")
    ready = _ready(seen, standing, backoff)
    fault = _fault(seen.trainer, ready, group)
    if fault is None:
        return Wait("every ready generator is a member")
    if not ready and seen.trainer.epoch == 0:
        return Wait("no generator is ready")
    if seen.now < standing.not_before:
        return Wait("the last attempt failed")
    if seen.num_starting and _have_just_come(ready, seen.now, standing):
        return Wait("others may join too")
    known = [seen.trainer.epoch, standing.epoch_floor, group.epoch if group else 0]
    epoch = 1 + max([*known, *(generator.epoch for generator in seen.generators)])
    return Form(
        assign_ranks(epoch, {generator.name: generator.num_workers for generator in ready}), fault
    )


def _ready(seen: Observation, standing: Standing, backoff: MemberBackoff) -> list[SeenGenerator]:
    """Who belongs into the group: members that are there, and newcomers that are neither left out
    nor just back.
    """
    members = standing.group.names if standing.group else ()

    def is_ready(generator: SeenGenerator) -> bool:
        is_back = (
            generator.name in members
            or not generator.was_away
            or seen.now - generator.seen_since >= standing.settle_s
        )
        return is_back and not backoff.is_out(generator.name, seen.now)

    return [generator for generator in seen.generators if is_ready(generator)]


def _fault(
    trainer: SeenTrainer, ready: Sequence[SeenGenerator], group: WeightGroup | None
) -> str | None:
    """Why the group is not what it should be, or None."""
    if group is None:
        return "no group"
    if trainer.epoch != group.epoch:
        return f"the trainer is in epoch {trainer.epoch}, not {group.epoch}"
    by_name = {generator.name: generator for generator in ready}
    gone = [name for name in group.names if name not in by_name]
    if gone:
        return f"{', '.join(gone)} left"
    for member in group.members:
        now = by_name[member.name]
        if now.epoch != group.epoch or now.num_workers != member.num_workers:
            return f"{member.name} restarted"
    newcomers = [name for name in by_name if name not in group.names]
    return f"{', '.join(newcomers)} joined" if newcomers else None


def _have_just_come(ready: Sequence[SeenGenerator], now: float, standing: Standing) -> bool:
    """Whether there are newcomers, and none has waited long enough for others."""
    members = standing.group.names if standing.group else ()
    since = [generator.seen_since for generator in ready if generator.name not in members]
    return bool(since) and now - min(since) < standing.settle_s
